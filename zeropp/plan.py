"""PlanRequest and Plan: what is asked for, and what every rank of one configuration does.

The Plan is the only thing that the engine, the simulator, the validator, the viewer and the
tests share. It imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from zeropp.cluster import Cluster
from zeropp.layout import Layout
from zeropp.literals import Auto, Placement, Precision, Recompute, ReduceEvery, WireType
from zeropp.programs import program_named
from zeropp.schedule.program import Schedule
from zeropp.shape import ModelShape


@dataclass(frozen=True)
class Settings:
    """Knobs of a contender. ``auto`` lets its planner choose; a planner refuses what it lacks."""

    name: str
    pp: int | Auto = "auto"
    tp: int = 1
    shard: int | Auto = 1  # ZeRO-3 group; auto: what remains inside a node
    replicate: int | Auto = "auto"  # data-parallel copies; auto: what remains
    replicate_zero: Literal[0, 1] = 0  # 1: optimizer state sharded over the replicas (ZeRO-1)
    chunks: int = 1  # model chunks a rank (V)
    unit: int | Auto = "auto"  # microbatches a scheduling unit (U), ZeroPP only
    activation_cap: int | Auto = "auto"  # live chunk-activations a rank; auto: U*V
    activation_cap_gib: float | Auto = "auto"  # the same cap by its size, instead
    schedule: str = "auto"  # name of the generator where a contender has several
    sequence_parallel: bool = False
    recompute: Recompute = "none"
    reduce_every: ReduceEvery = "unit"  # gradients reduced over the shards
    replicate_every: ReduceEvery = "step"  # and, at most as often, over the replicas
    reduce_dtype: WireType = "fp32"  # in which gradients are sent; they are summed in fp32
    prefetch: int = 1  # chunks gathered ahead of their use
    keep: int = 0  # chunks that may stay gathered between uses
    placement: Placement = "dp_inner"
    compile: bool = False  # torch.compile each block

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012


@dataclass(frozen=True)
class PlanRequest:
    """What a planner is given: sizes, hardware, batch and the contender's knobs."""

    shape: ModelShape
    cluster: Cluster
    num_gpus: int
    global_batch: int  # sequences a step
    microbatch_size: int  # sequences
    precision: Precision
    settings: Settings


@dataclass(frozen=True)
class MemoryBytes:
    """Predicted bytes of one rank by kind, at the moment of its peak."""

    parameters: int = 0  # sharded parameters (and fp32 masters)
    unsharded: int = 0  # gathered parameters
    gradients: int = 0  # sharded and unsharded gradients
    optimizer: int = 0
    activations: int = 0  # kept for backward, boundary buffers included
    workspace: int = 0  # logits, temporaries, communication buffers

    @property
    def total(self) -> int:
        """Sum over kinds: the predicted peak."""
        return (
            self.parameters
            + self.unsharded
            + self.gradients
            + self.optimizer
            + self.activations
            + self.workspace
        )


@dataclass(frozen=True)
class Plan:
    """Everything a rank needs to know about one step of one configuration.

    The model is the list of pieces ``[embedding, block 0 .. L-1, head]``; stage ``s`` holds
    pieces ``cuts[s] .. cuts[s+1]-1``. ``num_microbatches`` microbatches of
    ``microbatch_size`` sequences pass through the pipeline of every data-parallel rank a step.
    """

    contender: str
    shape: ModelShape
    layout: Layout
    microbatch_size: int
    schedule: Schedule
    cuts: tuple[int, ...]
    program: str  # name in the registry: what it has, overlaps, copies and keeps
    precision: Precision = "fp32"
    recompute: Recompute = "none"
    reduce_every: ReduceEvery = "unit"
    replicate_every: ReduceEvery = "step"
    reduce_dtype: WireType = "fp32"
    prefetch: int = 1
    keep: int = 0
    compile: bool = False
    memory: tuple[MemoryBytes, ...] = ()  # predicted, one a pipeline rank; empty if not predicted

    def __post_init__(self) -> None:
        """Refuse a program that is not registered (ValueError with the known names)."""
        program_named(self.program)

    @property
    def gathers(self) -> bool:
        """Parameters are gathered before use: they are sharded, or the program computes on 16-bit
        copies of fp32 parameters, as FSDP2's mixed precision does."""
        casts = program_named(self.program).state(self.precision).casts_parameters
        return self.layout.shard > 1 or casts

    @property
    def num_microbatches(self) -> int:
        """Microbatches a step and pipeline."""
        return self.schedule.num_microbatches

    @property
    def global_batch(self) -> int:
        """Sequences a step over all ranks."""
        return self.microbatch_size * self.num_microbatches * self.layout.dp

    def pieces_of(self, stage: int) -> range:
        """Indices of the pieces that a stage holds."""
        return range(self.cuts[stage], self.cuts[stage + 1])
