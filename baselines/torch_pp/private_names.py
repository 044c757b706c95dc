"""Private names of ``torch.distributed.pipelining``: classes that are imported, and methods that
are called or overridden.

A release of torch may move or change them; for each one ``tests/gloo/test_private_names.py`` says
what no longer works without it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _Action as TorchAction
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime as Runtime
from torch.distributed.pipelining.stage import _PipelineStageBase as StageBase

from zeropp.schedule.build import build as build_schedule
from zeropp.schedule.program import Op

__all__ = [
    "ObservedStage",
    "OneForwardOneBackward",
    "PlannedStage",
    "Runtime",
    "load_programs",
]


class OneForwardOneBackward(Runtime):
    """1F1B on the runtime that torch's other schedules use.

    That runtime posts receives early and gathers the parameters of stages once per step. Torch's
    own ``Schedule1F1B`` blocks on every message, and its order cannot be read out: in torch 2.13
    ``_get_pipeline_order`` leaves out the last rank's first forward.
    """

    def __init__(self, stages: list[PipelineStage], n_microbatches: int, **arguments: Any) -> None:
        super().__init__(stages, n_microbatches, **arguments)  # type: ignore[no-untyped-call]
        order = build_schedule(
            "1f1b", num_ranks=self._num_stages, chunks=1, num_microbatches=n_microbatches
        )
        self.pipeline_order = {
            rank: [TorchAction.from_str(str(action)) for action in program]
            for rank, program in enumerate(order.programs)
        }
        self._prepare_schedule_with_comms(self.pipeline_order)


class ObservedStage(PipelineStage):
    """A ``PipelineStage`` that reports every compute action and reduction to ``observer``, with the
    time of ``clock`` at which it began."""

    observer: Callable[[Op, int, int | None, float], None]
    clock: Callable[[], float]

    def forward_one_chunk(self, fwd_chunk_id: int, *arguments: Any, **keywords: Any) -> Any:
        start = self.clock()
        output = super().forward_one_chunk(fwd_chunk_id, *arguments, **keywords)
        self.observer(Op.FORWARD, self.stage_index, fwd_chunk_id, start)
        return output

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,
        full_backward: bool = True,
        last_backward: Any = False,
    ) -> None:
        start = self.clock()
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        op = Op.FULL_BACKWARD if full_backward else Op.BACKWARD_INPUT
        self.observer(op, self.stage_index, bwd_chunk_id, start)

    def backward_weight_one_chunk(
        self, bwd_chunk_id: int, *arguments: Any, **keywords: Any
    ) -> None:
        start = self.clock()
        super().backward_weight_one_chunk(bwd_chunk_id, *arguments, **keywords)
        self.observer(Op.BACKWARD_WEIGHT, self.stage_index, bwd_chunk_id, start)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        start = self.clock()
        super().perform_reduce_grad(grad_scale_factor)
        self.observer(Op.REDUCE_GRAD, self.stage_index, None, start)

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """Leave out messages to oneself, which gloo cannot send: in torch 2.11 the rank that holds
        two neighbouring stages of a V opens a connection to itself."""
        greetings: list[dist.P2POp] = super()._get_init_p2p_neighbors_ops()
        return [greeting for greeting in greetings if greeting.group_peer != self.group_rank]


class PlannedStage(StageBase):
    """A stage with only what torch's generators of orders read: its place in the pipeline."""

    def __init__(self, index: int, num_stages: int, num_ranks: int) -> None:
        self.stage_index, self.num_stages = index, num_stages
        self.group_rank, self.group_size, self.group = 0, num_ranks, None
        self.has_backward, self.submod = True, nn.Module()
        self.stage_index_to_group_rank: dict[int, int] = {}

    def _prepare_forward_infra(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError("planning only")

    _prepare_backward_infra = _create_grad_recv_info = _prepare_forward_infra


def load_programs(
    runtime: Runtime, file: Path, form: Literal["compute_only", "compute_comms"] = "compute_only"
) -> None:
    """Let torch's runtime run the programs in a CSV file, one row of actions per rank. To those of
    ``compute_only`` it adds transfers, gathers and reductions by its own rules."""
    runtime._load_csv(str(file), format=form)
