"""Degrees of parallelism, how ranks are numbered, and how ``auto`` degrees are filled in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from zeropp.plan import Auto, PlanRequest

Axis = Literal["tp", "pp", "shard", "replicate"]
Placement = Literal["dp_inner", "pp_inner"]

# Microbatches x stages: twice those of 64 ranks with 4 chunks and 512 microbatches. Planning takes
# some 20 s there; far beyond, it would only look as if it did nothing.
_MOST_ACTIONS = 2**18


class InfeasibleError(ValueError):
    """A well-formed configuration for which no plan exists; the message names field and way out."""


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


def resolve_layout(request: PlanRequest) -> Layout:
    """Fill in ``auto`` degrees and check that the degrees make up the ranks.

    ``pp: auto`` is one stage a node (two on one node, if the ranks allow); ``shard: auto`` the
    largest group that fits what remains of a node; ``replicate: auto`` the rest. Raises
    InfeasibleError with one line naming field, value and what would work.
    """
    settings = request.settings
    degrees = _fill_degrees(request)
    layout = Layout(
        pp=degrees["pp"],
        tp=degrees["tp"],
        shard=degrees["shard"],
        replicate=degrees["replicate"],
        chunks=settings.chunks,
        replicate_zero=settings.replicate_zero,
        sequence_parallel=settings.sequence_parallel,
        placement=settings.placement,
    )
    _check_stages(request, layout)
    return layout


def _fill_degrees(request: PlanRequest) -> dict[Axis, int]:
    """All four degrees; those that are given first take their share of the ranks."""
    settings, world, node = request.settings, request.num_gpus, request.cluster.gpus_per_node
    asked: dict[Axis, int | Auto] = {
        "tp": settings.tp,
        "pp": settings.pp,
        "shard": settings.shard,
        "replicate": settings.replicate,
    }
    degrees: dict[Axis, int] = {}
    rest = world
    for axis, degree in asked.items():
        if degree == "auto":
            continue
        if rest % degree:
            raise InfeasibleError(
                f"contender.{axis}={degree}: the degrees {_product(asked)} must multiply to "
                f"num_gpus={world} (try contender.{axis} in {divisors(rest)})"
            )
        degrees[axis], rest = degree, rest // degree
    limits: dict[Axis, int] = {
        "pp": max(2, world // node),
        "shard": max(1, node // settings.tp),
        "replicate": rest,
    }
    for axis, limit in limits.items():
        if axis not in degrees:
            degrees[axis] = max(d for d in divisors(rest) if d <= limit)
            rest //= degrees[axis]
    degrees = {axis: degrees[axis] for axis in asked}
    if rest != 1:
        raise InfeasibleError(
            f"num_gpus={world}: the degrees {_product(degrees)} multiply to {world // rest} "
            "(set one of them to auto)"
        )
    return degrees


def microbatches_per_step(request: PlanRequest, layout: Layout) -> int:
    """Microbatches a step and pipeline; raises InfeasibleError where the batch does not divide."""
    slots = layout.dp * request.microbatch_size
    if request.global_batch % slots:
        below = request.global_batch // slots * slots
        nearest = f"{below} or {below + slots}" if below else f"{slots}"
        raise InfeasibleError(
            f"global_batch={request.global_batch}: must be a multiple of microbatch_size="
            f"{request.microbatch_size} x {layout.dp} data-parallel ranks (try {nearest})"
        )
    count = request.global_batch // slots
    stages = layout.pp * layout.chunks
    if count > most_microbatches(stages):
        raise InfeasibleError(
            f"global_batch={request.global_batch}: {count} microbatches a step and pipeline x "
            f"{stages} stages are more than can be planned (at most {most_microbatches(stages)} "
            "microbatches; try a larger microbatch_size)"
        )
    return count


def most_microbatches(stages: int) -> int:
    """How many microbatches a step and pipeline of so many stages may have, to be planned."""
    return _MOST_ACTIONS // stages


def divisors(number: int) -> list[int]:
    """All divisors of a positive number, ascending."""
    return [d for d in range(1, number + 1) if number % d == 0]


def _check_stages(request: PlanRequest, layout: Layout) -> None:
    stages, layers = layout.pp * layout.chunks, request.shape.layers
    if stages > layers:
        raise InfeasibleError(
            f"contender.pp={layout.pp}: {layout.pp} x chunks={layout.chunks} = {stages} stages, "
            f"but {request.shape.name} has model.layers={layers} "
            f"(try contender.chunks <= {layers // layout.pp})"
            if layout.pp <= layers
            else f"contender.pp={layout.pp}: more stages than model.layers={layers} of "
            f"{request.shape.name} (try contender.pp <= {layers})"
        )


def _product(degrees: Mapping[Axis, object]) -> str:
    return " x ".join(f"{name}={value}" for name, value in degrees.items())
