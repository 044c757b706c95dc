"""The engine of one rank: chunks, messages, program and optimizer, one ``step`` at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from zeropp.engine.channels import Channels
from zeropp.engine.chunk import Chunk
from zeropp.engine.interpreter import Interpreter, LossFunction
from zeropp.engine.sharding import ChunkShards, full, local
from zeropp.engine.tied import TiedWeights
from zeropp.layout import Layout
from zeropp.optimizer import build_optimizer
from zeropp.plan import Precision, Recompute
from zeropp.schedule.program import Schedule
from zeropp.timeline import Span
from zeropp.training import OptimizerConfig, StepResult


@dataclass(frozen=True)
class Piece:
    """One pipeline piece that this rank holds. ``deferrable``: its linear layers may put off
    their weight gradients, and it is what recomputation recomputes (a transformer block)."""

    index: int
    stage: int
    module: nn.Module
    deferrable: bool


class Engine:
    """Trains the pieces of one rank. Construction and every method are collective.

    ``schedule`` is lowered; ``boundary(stage)`` makes an empty tensor for the message into a
    stage; ``tied`` names two parameters as (piece, name) that are one in the model.
    """

    def __init__(
        self,
        pieces: Sequence[Piece],
        schedule: Schedule,
        layout: Layout,
        loss_function: LossFunction,
        boundary: Callable[[int], Tensor],
        optimizer: OptimizerConfig,
        device: torch.device,
        *,
        precision: Precision = "fp32",
        recompute: Recompute = "none",
        tied: tuple[tuple[int, str], tuple[int, str]] | None = None,
    ) -> None:
        self._layout, self._clip_norm = layout, optimizer.clip_norm
        self._device = device
        self._pp_rank = layout.coordinates(dist.get_rank())["pp"]
        mesh = _data_mesh(layout, device, precision)
        self._pieces = sorted(pieces, key=lambda piece: piece.index)
        self._chunks = {
            stage: _make_chunk(
                [p for p in self._pieces if p.stage == stage], mesh, precision, recompute
            )
            for stage in schedule.stages_of(self._pp_rank)
        }
        self._interpreter = Interpreter(
            schedule.programs[self._pp_rank],
            self._chunks,
            schedule.stage_rank,
            Channels(_neighbours(schedule), layout, device),
            boundary,
            loss_function,
        )
        self._tied = TiedWeights(tied, dict(self.named_parameters()), schedule, layout)
        self._parameters = [parameter for _, parameter in self.named_parameters()]
        self.optimizer = build_optimizer(self._parameters, optimizer)

    def step(self, inputs: Sequence[Tensor], targets: Sequence[Tensor]) -> StepResult:
        """One optimizer step on this rank's microbatches; every rank gives its own."""
        self.optimizer.zero_grad()
        losses = self._interpreter.run(inputs, targets)
        self._tied.sum_gradients()
        result = self._reduce_result(losses)
        if self._clip_norm and result.grad_norm > self._clip_norm:
            scale = self._clip_norm / (result.grad_norm + 1e-6)  # as torch's clip_grad_norm_
            for gradient in self._local_gradients():
                gradient.mul_(scale)
        self.optimizer.step()
        return result

    def named_parameters(self) -> Iterator[tuple[tuple[int, str], nn.Parameter]]:
        """((piece, name), parameter) of this rank, sharded where there are shards."""
        for piece in self._pieces:
            for name, parameter in piece.module.named_parameters():
                yield (piece.index, name), parameter

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Unsharded fp32 CPU copies, named ``{piece}.{name}``."""
        for (index, name), parameter in self.named_parameters():
            whole = full(parameter.detach())
            if (index, name) != self._tied.copy:
                yield f"{index}.{name}", whole.float().cpu()

    def counters(self) -> dict[str, int]:
        """Actions run since construction, by name in lower case."""
        return dict(self._interpreter.counters)

    def record_spans(self, enabled: bool) -> None:
        """Record a span an action from here on, or stop."""
        self._interpreter.spans = [] if enabled else None

    def spans(self) -> list[Span]:
        """Spans recorded since recording was switched on."""
        return list(self._interpreter.spans or [])

    def _local_gradients(self) -> Iterator[Tensor]:
        for parameter in self._parameters:
            if parameter.grad is not None:
                yield local(parameter.grad)

    def _reduce_result(self, losses: Sequence[Tensor]) -> StepResult:
        """Mean loss and gradient norm, the same on every rank: one all-reduce of two numbers.

        Replicas hold the same gradients, so each counts for one part of their number.
        """
        totals = torch.zeros(2, dtype=torch.float64, device=self._device)
        if losses:
            totals[0] = torch.stack(list(losses)).sum() / self._layout.dp
        for key, parameter in self.named_parameters():
            if parameter.grad is not None and key != self._tied.copy:
                square = local(parameter.grad).float().square().sum(dtype=torch.float64)
                totals[1] += square / self._layout.replicate
        dist.all_reduce(totals)
        loss, square_norm = totals.tolist()
        return StepResult(loss, math.sqrt(square_norm))


def _make_chunk(
    pieces: Sequence[Piece], mesh: DeviceMesh | None, precision: Precision, recompute: Recompute
) -> Chunk:
    shards = ChunkShards([piece.module for piece in pieces], mesh, precision)
    return Chunk(shards, [piece.module for piece in pieces if piece.deferrable], recompute)


def _data_mesh(layout: Layout, device: torch.device, precision: Precision) -> DeviceMesh | None:
    """FSDP2's mesh of this rank; None where there is nothing to shard, reduce or cast."""
    if layout.dp == 1 and precision == "fp32":
        return None
    sizes = tuple(size for _, size in layout.axes)
    mesh = init_device_mesh(device.type, sizes, mesh_dim_names=tuple(n for n, _ in layout.axes))
    return mesh["shard"] if layout.replicate == 1 else mesh["replicate", "shard"]


def _neighbours(schedule: Schedule) -> set[tuple[int, int]]:
    """Ordered pairs of ranks between which messages go."""
    pairs = set()
    for source, target in zip(schedule.stage_rank, schedule.stage_rank[1:], strict=False):
        if source != target:
            pairs |= {(source, target), (target, source)}
    return pairs
