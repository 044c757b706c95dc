"""How a planner fills in ``auto`` degrees, and how many microbatches a step then has."""

from __future__ import annotations

from collections.abc import Mapping

from zeropp.layout import InfeasibleError, Layout, divisors, most_microbatches
from zeropp.literals import Auto, Axis
from zeropp.plan import PlanRequest


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
