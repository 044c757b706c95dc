"""Degrees of parallelism and how ranks are numbered. A leaf: it imports the literals alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod

from zeropp.types.literals import Axis, Exchange, Placement, ReplicateZero

# The largest product of microbatches and stages: twice that of 64 ranks with 4 chunks and 512
# microbatches. Planning takes some 20 s there; far above, it would seem to hang.
_MOST_ACTIONS = 2**18


class InfeasibleError(ValueError):
    """A well-formed configuration for which no plan exists.

    The message is one line that names the field, its value and a way out. ``kind`` says the same
    without values, so that a search can count how many configurations failed for one cause.
    """

    def __init__(self, message: str, kind: str = "refused by its planner") -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Degrees of parallelism and how ranks are numbered.

    ``shard`` is the number of ranks over which ZeRO-3 (FSDP) shards parameters, also known as
    ``dp_shard``. ``replicate`` is the number of such groups, also known as ``dp_replicate``; where
    ``replicate_zero`` is 1, the optimizer state is sharded over them, too (ZeRO-1); where it is 2,
    so are the sums of gradients, which are reduced for every microbatch (ZeRO-2). The ranks of
    ``replicate`` x ``shard`` train on different sequences. ``context`` is the number of ranks that
    train on the same sequences, each on a slice of the tokens; parameters are sharded over
    ``shard`` x ``context`` ranks, unless those ranks have copies as replicas have
    (``context_copies``); ``exchange`` is how their attention sees other tokens. ``chunks`` is the
    number of virtual stages per pipeline rank.

    ``placement`` says how global ranks are numbered, from the outermost axis to the innermost.
    ``dp_inner`` is [pp][replicate][shard][context][tp], which has data parallelism inside a node
    and the pipeline across nodes, as Megatron and DeepSpeed do. ``pp_inner`` is
    [replicate][shard][pp][context][tp].
    """

    pp: int = 1
    tp: int = 1
    context: int = 1
    shard: int = 1
    replicate: int = 1
    chunks: int = 1
    context_copies: bool = False
    exchange: Exchange = "heads"
    replicate_zero: ReplicateZero = 0
    sequence_parallel: bool = False
    placement: Placement = "dp_inner"

    @cached_property
    def dp(self) -> int:
        """Data-parallel ranks: each of them trains on other sequences."""
        return self.shard * self.replicate

    @cached_property
    def shards(self) -> int:
        """Ranks among which the parameters of a ZeRO-3 group are divided, and gathered."""
        return prod(getattr(self, axis) for axis in self.shard_axes)

    @cached_property
    def replicas(self) -> int:
        """Ranks that have the same part of the parameters."""
        return self.dp * self.context // self.shards

    @property
    def shard_axes(self) -> tuple[Axis, ...]:
        """The axes over which parameters are sharded."""
        return ("shard",) if self.context_copies else ("shard", "context")

    @property
    def replica_axes(self) -> tuple[Axis, ...]:
        """The axes over which gradients are all-reduced."""
        return ("replicate", "context") if self.context_copies else ("replicate",)

    @cached_property
    def world(self) -> int:
        """Number of ranks."""
        return self.tp * self.pp * self.dp * self.context

    @cached_property
    def axes(self) -> tuple[tuple[Axis, int], ...]:
        """(axis, size) from the outermost axis to the innermost: the shape of the device mesh."""
        pp, tp = ("pp", self.pp), ("tp", self.tp)
        data = ("replicate", self.replicate), ("shard", self.shard)
        inner = ("context", self.context), tp
        if self.placement == "dp_inner":
            return (pp, *data, *inner)  # type: ignore[return-value]
        return (*data, pp, *inner)  # type: ignore[return-value]

    def coordinates(self, rank: int) -> dict[Axis, int]:
        """The coordinate of a global rank on every axis."""
        place: dict[Axis, int] = {}
        for axis, size in reversed(self.axes):
            rank, place[axis] = divmod(rank, size)
        return place

    def rank_at(self, place: dict[Axis, int]) -> int:
        """The global rank at such coordinates (the inverse of ``coordinates``)."""
        rank = 0
        for axis, size in self.axes:
            rank = rank * size + place[axis]
        return rank

    def pipeline(self, rank: int) -> tuple[int, ...]:
        """The global ranks of the pipeline that contains ``rank``, in the order of the stages."""
        place = self.coordinates(rank)
        return tuple(self.rank_at(place | {"pp": p}) for p in range(self.pp))

    def pipelines(self) -> tuple[tuple[int, ...], ...]:
        """The global ranks of every pipeline, in the order of the pipelines' first ranks."""
        return tuple(sorted({self.pipeline(rank) for rank in range(self.world)}))

    def shard_index(self, rank: int) -> int:
        """The index, below ``shards``, of the part of the parameters that a rank has."""
        place = self.coordinates(rank)
        return place["shard"] * self.context + place["context"]

    @cached_property
    def alike(self) -> tuple[tuple[int, ...], ...]:
        """The global ranks that are given the same rows: those of a pipeline, and of the pipelines
        with other tokens of these rows."""
        ranks: dict[int, list[int]] = {}
        for rank in range(self.world):
            ranks.setdefault(self.dp_index(rank), []).append(rank)
        return tuple(map(tuple, ranks.values()))

    def is_first(self, rank: int) -> bool:
        """Whether a rank is the first of those that have its stages; others write nothing."""
        place = self.coordinates(rank)
        return not any(index for axis, index in place.items() if axis != "pp")

    def dp_index(self, rank: int) -> int:
        """The index, below ``dp``, of the slice of the global batch that a rank trains on."""
        place = self.coordinates(rank)
        return place["replicate"] * self.shard + place["shard"]


def most_microbatches(stages: int) -> int:
    """The largest number of microbatches per step that a pipeline of ``stages`` stages may have, so
    that its planning ends in reasonable time."""
    return _MOST_ACTIONS // stages


def microbatches_per_step(global_batch: int, layout: Layout, microbatch_size: int) -> int:
    """Microbatches per step and pipeline. Raises InfeasibleError if the global batch does not
    divide among the data-parallel ranks, or if there are more microbatches than can be planned."""
    slots = layout.dp * microbatch_size
    if global_batch % slots:
        below = global_batch // slots * slots
        nearest = f"{below} or {below + slots}" if below else f"{slots}"
        raise InfeasibleError(
            f"global_batch={global_batch}: must be a multiple of microbatch_size="
            f"{microbatch_size} x {layout.dp} data-parallel ranks (try {nearest})",
            "global batch does not divide",
        )
    count = global_batch // slots
    stages = layout.pp * layout.chunks
    if count > most_microbatches(stages):
        raise InfeasibleError(
            f"global_batch={global_batch}: {count} microbatches per step and pipeline x "
            f"{stages} stages are more than can be planned (at most {most_microbatches(stages)} "
            "microbatches; try a larger microbatch_size)",
            "more microbatches than can be planned",
        )
    return count


def divisors(number: int) -> list[int]:
    """All divisors of a positive number, ascending."""
    return [d for d in range(1, number + 1) if number % d == 0]
