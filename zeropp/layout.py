"""Degrees of parallelism and how ranks are numbered. A leaf: it imports the literals alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from zeropp.literals import Axis, Placement

# Microbatches x stages: twice those of 64 ranks with 4 chunks and 512 microbatches. Planning takes
# some 20 s there; far beyond, it would only look as if it did nothing.
_MOST_ACTIONS = 2**18


class InfeasibleError(ValueError):
    """A well-formed configuration for which no plan exists.

    The message is one line that names the field, its value and a way out; ``kind`` says the same
    without values, so that a search can count how many configurations fell for one cause.
    """

    def __init__(self, message: str, kind: str = "refused by its planner") -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True)
class Layout:
    """Degrees of parallelism and how ranks are numbered.

    ``shard`` is the ZeRO-3 (FSDP) group over which parameters are sharded; ``replicate`` is the
    number of data-parallel copies of that group, over which the optimizer state is sharded too
    where ``replicate_zero`` is 1. A rank's sequence of batches is set by its place on
    ``replicate`` x ``shard``. Tensor parallelism is always innermost. ``dp_inner`` numbers ranks
    [pp][replicate][shard][tp] (data parallelism inside the node, pipeline across: Megatron's and
    DeepSpeed's order); ``pp_inner`` numbers them [replicate][shard][pp][tp].
    """

    pp: int = 1
    tp: int = 1
    shard: int = 1
    replicate: int = 1
    chunks: int = 1
    replicate_zero: Literal[0, 1] = 0
    sequence_parallel: bool = False
    placement: Placement = "dp_inner"

    @property
    def dp(self) -> int:
        """Data-parallel ranks: every one of them sees other sequences."""
        return self.shard * self.replicate

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.tp * self.pp * self.dp

    @property
    def axes(self) -> tuple[tuple[Axis, int], ...]:
        """Axes from outermost to innermost with their sizes; the shape of the device mesh."""
        pp, tp = ("pp", self.pp), ("tp", self.tp)
        rep, shard = ("replicate", self.replicate), ("shard", self.shard)
        if self.placement == "dp_inner":
            return (pp, rep, shard, tp)  # type: ignore[return-value]
        return (rep, shard, pp, tp)  # type: ignore[return-value]

    def coordinates(self, rank: int) -> dict[Axis, int]:
        """Place of a global rank on every axis."""
        place: dict[Axis, int] = {}
        for axis, size in reversed(self.axes):
            rank, place[axis] = divmod(rank, size)
        return place

    def rank_at(self, place: dict[Axis, int]) -> int:
        """Global rank at a place (inverse of ``coordinates``)."""
        rank = 0
        for axis, size in self.axes:
            rank = rank * size + place[axis]
        return rank

    def pipeline(self, rank: int) -> tuple[int, ...]:
        """Global ranks of the pipeline that a rank is in, by pipeline rank."""
        place = self.coordinates(rank)
        return tuple(self.rank_at(place | {"pp": p}) for p in range(self.pp))

    def pipelines(self) -> tuple[tuple[int, ...], ...]:
        """All pipelines, in the order of their first ranks."""
        return tuple(sorted({self.pipeline(rank) for rank in range(self.world)}))

    def dp_index(self, rank: int) -> int:
        """Which of the ``dp`` slices of the global batch a rank trains on."""
        place = self.coordinates(rank)
        return place["replicate"] * self.shard + place["shard"]


def most_microbatches(stages: int) -> int:
    """The largest number of microbatches per step for which a pipeline of so many stages can be
    planned."""
    return _MOST_ACTIONS // stages


def divisors(number: int) -> list[int]:
    """All divisors of a positive number, ascending."""
    return [d for d in range(1, number + 1) if number % d == 0]
