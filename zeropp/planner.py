"""ZeroPP's planner: from a request to the Plan that the engine runs. Imports no torch."""

from __future__ import annotations

from zeropp.cost import balanced_cuts
from zeropp.layout import InfeasibleError, microbatches_per_step, resolve_layout
from zeropp.plan import Plan, PlanRequest
from zeropp.schedule import build, lower, validate
from zeropp.schedule.zeropp import smallest_cap


def plan_zeropp(request: PlanRequest) -> Plan:
    """PP x ZeRO-3 (x replicas), no tensor parallelism; raises InfeasibleError in one line."""
    settings = request.settings
    if settings.tp != 1:
        raise InfeasibleError(
            f"contender.tp={settings.tp}: ZeroPP has no tensor parallelism (use contender.tp=1; "
            "contender.shard takes its place)"
        )
    if settings.schedule not in ("auto", "zeropp"):
        raise InfeasibleError(
            f"contender.schedule={settings.schedule!r}: zeropp runs its own schedule (use auto)"
        )
    layout = resolve_layout(request)
    if settings.compile:
        raise InfeasibleError(
            "contender.compile=true: not supported with deferred weight gradients (use false)"
        )
    microbatches = microbatches_per_step(request, layout)
    unit = layout.pp if settings.unit == "auto" else settings.unit
    unit = min(unit, microbatches)
    cap = unit * layout.chunks if settings.activation_cap == "auto" else settings.activation_cap
    smallest = smallest_cap(layout.chunks, microbatches, unit)
    if cap < smallest:
        raise InfeasibleError(
            f"contender.activation_cap={cap}: a unit of {unit} microbatches in {layout.chunks} "
            f"chunks needs at least {smallest}"
        )
    schedule = build(
        "zeropp",
        num_ranks=layout.pp,
        chunks=layout.chunks,
        num_microbatches=microbatches,
        unit=unit,
        activation_cap=cap,
    )
    schedule = lower(
        schedule,
        # On one shard a gather is a cast: bf16 copies of fp32 masters.
        gather=layout.shard > 1 or request.precision == "bf16",
        prefetch=settings.prefetch,
        reduce_every=settings.reduce_every,
    )
    validate(schedule, activation_cap=cap)
    return Plan(
        contender=settings.name,
        shape=request.shape,
        layout=layout,
        microbatch_size=request.microbatch_size,
        schedule=schedule,
        cuts=balanced_cuts(request.shape, schedule.num_stages),
        runtime="fsdp2",
        precision=request.precision,
        recompute=settings.recompute,
        reduce_every=settings.reduce_every,
        prefetch=settings.prefetch,
    )
