"""Task, Candidate and Plan: what is trained, a contender's settings, and what every rank does.

A ``SizedPlan`` becomes a ``Plan`` once its order of actions is chosen. The engine, the simulator,
the validation and the viewer all work from the same Plan, so that what is priced is what runs.
Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from itertools import pairwise
from math import ceil, floor
from typing import Generic, Protocol, TypeVar

from zeropp.cluster import Cluster
from zeropp.layout import Layout
from zeropp.literals import BlockHalf, Precision, Recompute, ReduceEvery, WireType
from zeropp.programs import program_named
from zeropp.schedule.program import Schedule, ScheduleSizes
from zeropp.shape import ModelShape


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is trained and on what: the same for every contender of a comparison."""

    shape: ModelShape
    cluster: Cluster
    num_gpus: int
    global_batch: int  # sequences per step, over all ranks
    precision: Precision = "bf16"


class Knobs(Protocol):
    """A contender's settings: a frozen dataclass of its own.

    A field with the name of an axis (``pp``, ``tp``, ``shard``, ``replicate``) is that axis's
    degree; an axis without a field has degree 1.
    """

    @property
    def name(self) -> str:
        """The contender's name in the registry."""
        ...


K = TypeVar("K", bound=Knobs)


@dataclass(frozen=True)
class Candidate(Generic[K]):
    """What a search tries: a contender's knobs and the number of sequences per microbatch."""

    knobs: K
    microbatch_size: int


@dataclass(frozen=True, kw_only=True)
class MemoryBytes:
    """Bytes of one rank by kind, predicted or traced, at the moment of their highest total."""

    parameters: int = 0  # sharded parameters (and fp32 masters)
    unsharded: int = 0  # gathered parameters
    gradients: int = 0  # sharded and unsharded gradients
    optimizer: int = 0
    activations: int = 0  # kept for backward, with stage inputs and outputs
    workspace: int = 0  # logits, temporaries, communication buffers

    @property
    def total(self) -> int:
        """Sum over kinds: the peak."""
        return (
            self.parameters
            + self.unsharded
            + self.gradients
            + self.optimizer
            + self.activations
            + self.workspace
        )


@dataclass(frozen=True, kw_only=True)
class SizedPlan:
    """Everything about one step of one configuration except for the order of actions, which the
    cost model does not need.

    The model is the list of pieces ``[embedding, block 0 .. L-1, head]``. Stage ``s`` begins at
    ``cuts[s]`` and ends before ``cuts[s+1]``: 3 is the beginning of piece 3, and 3.5 is inside
    piece 3, a block, between its attention and its MLP. In every step ``num_microbatches``
    microbatches of ``microbatch_size`` sequences pass through every pipeline.
    """

    contender: str
    shape: ModelShape
    layout: Layout
    microbatch_size: int
    schedule: ScheduleSizes
    cuts: tuple[float, ...]
    program: str  # name of the training program in ``zeropp.programs``
    precision: Precision = "fp32"
    recompute: Recompute = "none"
    # How many blocks of each stage are recomputed, which are its first ones; empty: all blocks.
    # Halves of blocks are never recomputed.
    recomputed: tuple[int, ...] = ()
    reduce_every: ReduceEvery = "unit"
    reduce_dtype: WireType = "fp32"
    prefetch: int = 1
    split_backward: bool = True
    activation_cap: int = 0  # most chunk-activations that a rank holds at a time; 0: no cap
    compile: bool = False
    # Predicted memory per pipeline rank; empty where nothing was predicted.
    memory: tuple[MemoryBytes, ...] = ()

    def __post_init__(self) -> None:
        """Raise ValueError, with the known names, if the program is not registered."""
        program_named(self.program)

    @property
    def gathers(self) -> bool:
        """Whether parameters are gathered before use: because they are sharded, or because the
        program computes on 16-bit copies of fp32 parameters, as FSDP2's mixed precision does."""
        casts = program_named(self.program).state(self.precision).casts_parameters
        return self.layout.shard > 1 or casts

    @property
    def num_microbatches(self) -> int:
        """Microbatches per step and pipeline."""
        return self.schedule.num_microbatches

    @property
    def num_units(self) -> int:
        """Scheduling units per step, the last of which may be short."""
        return -(-self.num_microbatches // self.schedule.unit)

    @property
    def global_batch(self) -> int:
        """Sequences per step over all ranks."""
        return self.microbatch_size * self.num_microbatches * self.layout.dp

    def pieces_of(self, stage: int) -> range:
        """The indices of the whole pieces of a stage."""
        return range(ceil(self.cuts[stage]), floor(self.cuts[stage + 1]))

    def halves_of(self, stage: int) -> tuple[tuple[int, BlockHalf], ...]:
        """(index of the piece, half) of the halves of blocks in a stage: the MLP of a block in
        which it begins, and the attention of a block in which it ends."""
        begin, end = self.cuts[stage], self.cuts[stage + 1]
        halves: list[tuple[int, BlockHalf]] = [(floor(begin), "mlp")] if begin % 1 else []
        return (*halves, *([(floor(end), "attention")] if end % 1 else []))  # type: ignore[arg-type]

    @cached_property
    def blocks(self) -> tuple[int, ...]:
        """The number of whole transformer blocks per stage."""
        return _whole_blocks(self.cuts, self.shape.num_pieces)

    def blocks_of(self, stage: int) -> int:
        """The number of whole transformer blocks in a stage."""
        return self.blocks[stage]

    @cached_property
    def recomputed_per_stage(self) -> tuple[int, ...]:
        """The number of blocks that are recomputed, per stage; they are its first ones."""
        if self.recompute == "none":
            return (0,) * len(self.blocks)
        return tuple(map(min, self.blocks, self.recomputed)) if self.recomputed else self.blocks

    def recomputed_blocks(self, stage: int) -> int:
        """The number of blocks of a stage that are recomputed; they are its first ones."""
        return self.recomputed_per_stage[stage]

    def recomputes(self, stage: int, piece: int) -> bool:
        """Whether piece ``piece`` of stage ``stage`` is a block that is recomputed."""
        first = max(1, self.cuts[stage])
        return first <= piece < first + self.recomputed_blocks(stage)

    def ordered(self, schedule: Schedule) -> Plan:
        """The same plan with the programs of ``schedule``, which must have the plan's sizes."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return Plan(**values | {"schedule": schedule})


@dataclass(frozen=True, kw_only=True)
class Plan(SizedPlan):
    """A plan with its order of actions: all that a rank needs to know about one step."""

    schedule: Schedule


@lru_cache(maxsize=4096)
def _whole_blocks(cuts: tuple[float, ...], num_pieces: int) -> tuple[int, ...]:
    """Whole blocks per stage: its whole pieces without embedding and head."""
    first_and_last = (0, num_pieces - 1)
    stages = [range(ceil(begin), floor(end)) for begin, end in pairwise(cuts)]
    return tuple(len(pieces) - sum(end in pieces for end in first_and_last) for pieces in stages)
