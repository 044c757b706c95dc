"""Plans: what every rank does in one step.

A ``SizedPlan`` becomes a ``Plan`` once its order of actions is chosen. The engine, the simulator,
the validation and the viewer all work from the same Plan, so that what is priced is what runs.
Imports no torch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from itertools import pairwise

from zeropp.schedule.legality import validate
from zeropp.schedule.passes import with_step_end
from zeropp.schedule.program import Schedule, ScheduleSizes, StepEnd
from zeropp.types.frozen import replace
from zeropp.types.layout import Layout
from zeropp.types.literals import Offloaded, Precision, Recompute, ReduceEvery, WireType
from zeropp.types.shape import ModelShape

# Schedules in which every chunk runs all microbatches of the step one after another.
_ONCE = ("accumulation", "gpipe", "looped_bfs")


@dataclass(frozen=True, kw_only=True)
class MemoryBytes:
    """Bytes of one rank by kind, predicted or traced, at the moment of their highest total."""

    parameters: int = 0  # sharded parameters (and fp32 masters)
    unsharded: int = 0  # gathered parameters
    gradients: int = 0  # sharded and unsharded gradients
    optimizer: int = 0
    activations: int = 0  # kept for backward, with stage inputs and outputs
    workspace: int = 0  # logits, temporaries, communication buffers
    host: int = 0  # of the host: the most that activations take there, at whatever moment

    @property
    def total(self) -> int:
        """Sum over the device's kinds: the peak."""
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

    The model is the list of pieces ``[embedding, block 0 .. L-1, head]``. Stage ``s`` has the
    pieces from ``cuts[s]`` to before ``cuts[s+1]``. In every step ``num_microbatches`` microbatches
    of ``microbatch_size`` sequences pass through every pipeline.
    """

    contender: str
    shape: ModelShape
    layout: Layout
    microbatch_size: int
    schedule: ScheduleSizes
    cuts: tuple[int, ...]
    program: str  # name of the training program in ``zeropp.price.programs``
    precision: Precision = "fp32"
    recompute: Recompute = "none"
    # How many blocks of each stage are recomputed, which are its first ones; empty: all blocks.
    recomputed: tuple[int, ...] = ()
    # How many blocks of each stage, which are its first ones, keep their tensors in the host's
    # memory between forward and backward; empty: none.
    offloaded: tuple[int, ...] = ()
    offloads: Offloaded = "all"  # of these blocks' tensors
    reduce_every: ReduceEvery = "unit"
    reduce_dtype: WireType = "fp32"
    sum_dtype: WireType = "fp32"  # the type in which gradients of microbatches are added
    gradient_parts: int = 1  # in which a chunk's gradients are reduced; 1: as a whole
    prefetch: int = 1
    split_backward: bool = True
    merged_microbatches: int = 1  # whose weight gradients of a layer are one product
    logits_slices: int = 1  # of a microbatch's tokens, in which head and loss are computed
    activation_cap: int = 0  # most chunk-activations that a rank holds at a time; 0: no cap
    compile: bool = False
    # The pieces that share a parameter, of a model whose shape does not say that embedding and head
    # do.
    tied_pieces: tuple[int, ...] = ()
    # The optimizer groups whose parameters are updated whole, each by one of the ranks that have
    # parts of it.
    whole_groups: tuple[str, ...] = ()
    # Predicted memory per pipeline rank; empty where nothing was predicted.
    memory: tuple[MemoryBytes, ...] = ()

    @property
    def num_microbatches(self) -> int:
        """Microbatches per step and pipeline."""
        return self.schedule.num_microbatches

    @property
    def num_units(self) -> int:
        """Scheduling units per step; the last one may be short."""
        return -(-self.num_microbatches // self.schedule.unit)

    @property
    def period(self) -> int:
        """The microbatches after which the order of a long step repeats itself: units of at least
        one round of the pipeline, or all where each chunk runs all of them one after another, or
        where interleaved groups are larger than a round."""
        unit, ranks, m = self.schedule.unit, self.layout.pp, self.num_microbatches
        in_groups = self.schedule.name in ("interleaved_1f1b", "interleaved_zb")
        if ranks == 1 or self.schedule.name in _ONCE or (in_groups and m % ranks):
            return m
        return unit * -(-ranks // unit) if unit < m else ranks

    @property
    def keeping_all(self) -> SizedPlan:
        """The plan with these cuts that recomputes and offloads nothing."""
        return replace(self, recompute="none", recomputed=(), offloaded=())

    def shortened(self, num_microbatches: int) -> SizedPlan:
        """The plan of a step with fewer microbatches, and of the same price."""
        unit = num_microbatches if self.num_units == 1 else self.schedule.unit
        sizes = replace(self.schedule, num_microbatches=num_microbatches, unit=unit)
        return replace(self, schedule=sizes)

    @property
    def global_batch(self) -> int:
        """Sequences per step over all ranks."""
        return self.microbatch_size * self.num_microbatches * self.layout.dp

    def pieces_of(self, stage: int) -> range:
        """The indices of the pieces of a stage."""
        return range(self.cuts[stage], self.cuts[stage + 1])

    def stage_of(self, piece: int) -> int:
        """The stage of a piece."""
        return bisect_right(self.cuts, piece) - 1

    @cached_property
    def blocks(self) -> tuple[int, ...]:
        """The number of transformer blocks per stage."""
        return _blocks(self.cuts)

    @cached_property
    def recomputed_per_stage(self) -> tuple[int, ...]:
        """The number of blocks that are recomputed, per stage; they are its first ones."""
        if self.recompute == "none":
            return (0,) * len(self.blocks)
        return tuple(map(min, self.blocks, self.recomputed)) if self.recomputed else self.blocks

    @cached_property
    def offloaded_per_stage(self) -> tuple[int, ...]:
        """The number of blocks whose tensors wait in the host's memory, per stage."""
        return tuple(map(min, self.blocks, self.offloaded)) or (0,) * len(self.blocks)

    def parts_of(self, stage: int) -> int:
        """The parts in which the gradients of a stage are reduced; none is less than a matrix."""
        return max(1, min(self.gradient_parts, self.blocks[stage] * (3 + self.shape.gates)))

    @property
    def offload_blocks(self) -> int:
        """The number of these blocks on the rank that has the most."""
        ranks = range(self.schedule.num_ranks)
        counts = self.offloaded_per_stage
        return max(sum(counts[s] for s in self.schedule.stages_of(rank)) for rank in ranks)

    def first_of_ranks(self, count: int) -> tuple[int, ...]:
        """Per stage, those blocks that are among the first ``count`` of their rank: those of its
        first chunks, whose activations are held the longest."""
        left = [count] * self.schedule.num_ranks
        firsts = []
        for rank, blocks in zip(self.schedule.stage_rank, self.blocks, strict=True):
            firsts.append(min(left[rank], blocks))
            left[rank] -= firsts[-1]
        return tuple(firsts)

    def spread_over_ranks(self, count: int) -> tuple[int, ...]:
        """Per stage, those blocks that are among ``count`` of their rank, evenly spread, so that
        what is done for them is, too."""
        return _spread(self.schedule.stage_rank, self.blocks, count)

    @cached_property
    def offloaded_stages(self) -> tuple[int, ...]:
        """The stages that have such blocks."""
        return tuple(s for s, count in enumerate(self.offloaded_per_stage) if count)

    def recomputes(self, stage: int, piece: int) -> bool:
        """Whether piece ``piece`` of stage ``stage`` is a block that is recomputed."""
        first = max(1, self.cuts[stage])
        return first <= piece < first + self.recomputed_per_stage[stage]

    @property
    def sharing_pieces(self) -> tuple[int, ...]:
        """The two pieces that share a parameter, in their order; empty if none is shared."""
        return (0, self.shape.num_pieces - 1) if self.shape.tied_embeddings else self.tied_pieces

    @cached_property
    def tied_stages(self) -> tuple[int, ...]:
        """The two stages that each have a copy of the parameter that two pieces share; empty if
        none is shared, or if a single stage has it."""
        stages = {self.stage_of(piece) for piece in self.sharing_pieces}
        # Under FSDP, where every piece is a stage, both pieces use one parameter.
        is_one = len(stages) < 2 or self.schedule.name == "accumulation"
        return () if is_one else tuple(sorted(stages))

    @property
    def step_end(self) -> StepEnd:
        """What follows the passes of a step."""
        replicas = self.layout.replicas > 1
        sharded = replicas and self.layout.replicate_zero > 0
        whole = bool(self.whole_groups) and (sharded or self.layout.shards > 1)
        return StepEnd(replicas, self.tied_stages, sharded or whole, whole)

    def ordered(self, schedule: Schedule) -> Plan:
        """The same plan with the programs of a lowered ``schedule``, which must have the plan's
        sizes, and with the end of the step."""
        return self.with_programs(with_step_end(schedule, self.step_end))

    def with_programs(self, schedule: Schedule) -> Plan:
        """The same plan with these programs, which may be a part of a step."""
        return Plan(
            **{field.name: getattr(self, field.name) for field in fields(self)}
            | {"schedule": schedule}
        )


@dataclass(frozen=True, kw_only=True)
class Plan(SizedPlan):
    """A plan with its order of actions: all that a rank needs to know about one step."""

    schedule: Schedule

    def check(self) -> None:
        """Raise ScheduleError for programs that are illegal, deadlock, exceed the plan's cap, or
        end otherwise than it says."""
        validate(self.schedule, activation_cap=self.activation_cap or None, end=self.step_end)


_ROUNDING = 1e-9
TooLarge = Callable[[Schedule], bool]


@dataclass(frozen=True)
class Draft:
    """An order of a plan's actions. ``complete`` gives the plan with its programs. Where that takes
    long, because gathers, reductions and transfers must be added, ``compute`` has the compute
    actions; of an order that is too large it may be the beginning alone."""

    complete: Callable[[], Plan]
    compute: Schedule | None = None


@lru_cache(maxsize=4096)
def _blocks(cuts: tuple[int, ...]) -> tuple[int, ...]:
    """Blocks per stage: all pieces but the embedding and the head, which are the first and the
    last."""
    counts = [end - begin for begin, end in pairwise(cuts)]
    counts[0] -= 1
    counts[-1] -= 1
    return tuple(counts)


@lru_cache(maxsize=16384)
def _spread(ranks: tuple[int, ...], blocks: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Blocks per stage, of the rank of each, as ``spread_over_ranks`` gives them."""
    before, whole = Counter[int](), Counter[int]()
    for rank, own in zip(ranks, blocks, strict=True):
        whole[rank] += own
    spread = []
    for rank, own in zip(ranks, blocks, strict=True):
        share = min(1.0, count / whole[rank]) if whole[rank] else 0.0
        first, end = (int(share * n + _ROUNDING) for n in (before[rank], before[rank] + own))
        spread.append(end - first)
        before[rank] += own
    return tuple(spread)
