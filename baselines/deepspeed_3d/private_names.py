"""Names inside DeepSpeed that it does not document, and that the trainer and its traces need.

A release of DeepSpeed may move or change them; for each one ``tests/gloo/test_private_names.py``
says what no longer works without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import real_accelerator
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.pipe import schedule as instructions
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.utils import PartitionedTensor, partition_uniform
from deepspeed.runtime.zero import partitioned_param_coordinator
from deepspeed.runtime.zero.linear import zero3_linear_wrap as zero3_linear
from deepspeed.utils import groups
from torch import Tensor
from torch.distributed import ProcessGroup

from zeropp.schedule.program import Op

__all__ = [
    "ACCELERATOR",
    "COMPARES_ORDERS",
    "DTYPE_CODES",
    "OPS",
    "PARTS_AS_NUMBERS",
    "CutPipeline",
    "forbid_shared_memory_collectives",
    "has_whole_gradients",
    "is_tied_copy",
    "neighbours",
    "observe_instructions",
    "partition_uniform",
    "reduced_gradients",
    "zero3_linear",
]

DTYPE_CODES: dict[torch.dtype, int] = PipelineEngine.DTYPE_TO_ID  # as stages name types in messages

OPS: dict[type, Op] = {
    instructions.ForwardPass: Op.FORWARD,
    instructions.BackwardPass: Op.FULL_BACKWARD,
    instructions.SendActivation: Op.SEND_F,
    instructions.RecvActivation: Op.RECV_F,
    instructions.SendGrad: Op.SEND_B,
    instructions.RecvGrad: Op.RECV_B,
    instructions.ReduceTiedGrads: Op.REDUCE_TIED,
    instructions.ReduceGrads: Op.REDUCE_GRAD,
    instructions.OptimizerStep: Op.UPDATE,
}

ACCELERATOR = (real_accelerator, "ds_accelerator")  # the device that DeepSpeed sees
COMPARES_ORDERS = (partitioned_param_coordinator, "assert_ints_same_as_other_ranks")  # of modules
PARTS_AS_NUMBERS = (PartitionedTensor, "to_meta")  # by which stages describe a tensor's parts

Handler = Callable[..., None]


class CutPipeline(PipelineModule):  # type: ignore[misc]
    """A ``PipelineModule`` whose stages begin at the plan's ``cuts``."""

    def __init__(self, cuts: tuple[int, ...], **arguments: Any) -> None:
        # With tied embeddings the head is two layers: its norm, and the embedding a second time.
        self._cuts = (*cuts[:-1], len(arguments["layers"]))
        super().__init__(**arguments)

    def _partition_layers(self, method: str = "uniform") -> None:
        del method
        stage = self._topo.get_coord(self.global_rank).pipe
        self.parts = list(self._cuts)
        self._set_bounds(start=self._cuts[stage], stop=self._cuts[stage + 1])


def forbid_shared_memory_collectives() -> None:
    """Switch off DeepSpeed's own all-reduce over shared memory (CPU).

    It is compiled on first use, and a rank that is killed meanwhile leaves a lock for which every
    later run waits. On CPUs all contenders use gloo.
    """
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def neighbours(ranks: int) -> ProcessGroup:
    """This rank's group of ``ranks`` side by side, which DeepSpeed makes once per process."""
    groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None
    groups._create_zero_param_parallel_group(ranks)
    return groups._get_zero_param_intra_parallel_group()  # type: ignore[no-any-return]


def observe_instructions(engine: Any, observed: Callable[[type, Handler], Handler]) -> None:
    """Put what ``observed(kind, handler)`` gives in the place of each instruction's handler."""
    handlers = engine._INSTRUCTION_MAP.items()
    engine._INSTRUCTION_MAP = {kind: observed(kind, run) for kind, run in handlers}


def is_tied_copy(parameter: Any) -> bool:
    """Whether a parameter is a tied layer's copy, which an earlier stage holds, too."""
    return bool(getattr(parameter, "ds_pipe_replicated", False))


def has_whole_gradients(optimizer: Any) -> bool:
    """Whether a rank has the reduced gradients of all of its parameters, in fp32, and its optimizer
    takes their norm: bf16 with fp32 accumulation."""
    return hasattr(optimizer, "fp32_groups_gradients")


def reduced_gradients(
    optimizer: Any, parameters: Iterable[Tensor], copies: int
) -> Iterator[tuple[Tensor, Tensor, int]]:
    """(parameter, reduced gradient or this rank's part of it, ranks that hold the same of it).

    ``parameters`` are the module's; ``copies``: over how many data-parallel ranks they are
    replicated.
    """
    if hasattr(optimizer, "averaged_gradients"):  # each rank keeps its partition
        is_zero3 = hasattr(optimizer, "fp16_partitioned_groups")  # which has parts of all
        held = optimizer.fp16_groups if is_zero3 else optimizer.params_in_partition
        for group, partition in enumerate(held):
            parts = optimizer.averaged_gradients[group]
            for parameter, part in zip(partition, parts, strict=is_zero3):
                yield parameter, part, 1
    elif has_whole_gradients(optimizer):
        groups = zip(optimizer.bf16_groups, optimizer.fp32_groups_gradients, strict=True)
        for partition, gradients in groups:
            for parameter, gradient in zip(partition, gradients, strict=True):
                yield parameter, gradient, copies
    else:
        for parameter in parameters:
            if parameter.grad is not None:
                yield parameter, parameter.grad, copies
