"""ZeroPP's planner: from a request to the Plan that the engine runs. Imports no torch.

The order of a step is planned with the durations that the cost model gives the request's cluster,
and the simulator decides between it and the order for equal durations. The tuner calls the same
function, so what it prices is what the engine runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache

from zeropp.cost import PlanPrice, balanced_cuts, price_plan
from zeropp.cost.cluster import Cluster
from zeropp.layout import InfeasibleError, Layout, microbatches_per_step, resolve_layout
from zeropp.plan import Plan, PlanRequest, ReduceEvery, Settings
from zeropp.schedule import lower, validate
from zeropp.schedule.program import Schedule, StageCost, loop_placement
from zeropp.schedule.zeropp import candidates, smallest_cap
from zeropp.sim.simulate import SimResult, simulate


def plan_zeropp(request: PlanRequest) -> Plan:
    """PP x ZeRO-3 (x replicas), no tensor parallelism; raises InfeasibleError in one line."""
    settings = request.settings
    _refuse_what_zeropp_lacks(settings)
    layout = resolve_layout(request)
    microbatches = microbatches_per_step(request, layout)
    unit = layout.pp if settings.unit == "auto" else settings.unit
    placement = loop_placement(layout.pp, layout.chunks)
    sizes = Schedule("zeropp", microbatches, min(unit, microbatches), placement, ())
    plan = assemble(request, layout, sizes)
    price = price_plan(plan, request.cluster)
    cap = _activation_cap(settings, plan)
    plan = fastest(orders(plan, cap, price), request.cluster, price).plan
    validate(plan.schedule, activation_cap=cap)
    return plan


def fastest(plans: Iterable[Plan], cluster: Cluster, price: PlanPrice) -> SimResult:
    """The plan with the shortest simulated step, the first of equals; ``price`` is that of all."""
    return min((simulate(plan, cluster, price=price) for plan in plans), key=lambda r: r.step_s)


def assemble(
    request: PlanRequest, layout: Layout, schedule: Schedule, cuts: tuple[int, ...] | None = None
) -> Plan:
    """The plan of a request, once its degrees and its schedule are known. ``cuts``: by default
    stages of equal cost. Every contender's planner ends here."""
    settings = request.settings
    return Plan(
        contender=settings.name,
        shape=request.shape,
        layout=layout,
        microbatch_size=request.microbatch_size,
        schedule=schedule,
        cuts=cuts or balanced_cuts(request.shape, schedule.num_stages),
        precision=request.precision,
        recompute=settings.recompute,
        reduce_every=settings.reduce_every,
        prefetch=settings.prefetch,
        compile=settings.compile,
    )


def orders(plan: Plan, activation_cap: int, price: PlanPrice) -> tuple[Plan, ...]:
    """A ZeroPP plan of sizes alone with each of the programs to choose from: whole programs that
    keep the cap (chunk-activations)."""
    schedules = _lowered(
        plan.layout.pp,
        plan.layout.chunks,
        plan.num_microbatches,
        plan.schedule.unit,
        activation_cap,
        tuple(replace(cost, unshard=0.0, reduce_grad=0.0) for cost in price.stages),
        plan.gathers,
        plan.prefetch,
        plan.reduce_every,
    )
    return tuple(replace(plan, schedule=schedule) for schedule in schedules)


@lru_cache(maxsize=128)
def _lowered(
    num_ranks: int,
    chunks: int,
    num_microbatches: int,
    unit: int,
    activation_cap: int,
    costs: tuple[StageCost, ...],
    gather: bool,
    prefetch: int,
    reduce_every: ReduceEvery,
) -> tuple[Schedule, ...]:
    """Lowered schedules; many plans that differ in other degrees share them."""
    found = candidates(num_ranks, chunks, num_microbatches, unit, activation_cap, costs)
    return tuple(
        lower(order, gather=gather, prefetch=prefetch, reduce_every=reduce_every) for order in found
    )


def _activation_cap(settings: Settings, plan: Plan) -> int:
    """Live chunk-activations a rank."""
    unit, chunks = plan.schedule.unit, plan.layout.chunks
    cap = unit * chunks if settings.activation_cap == "auto" else settings.activation_cap
    smallest = smallest_cap(chunks, plan.num_microbatches, unit)
    if cap < smallest:
        raise InfeasibleError(
            f"contender.activation_cap={cap}: a unit of {unit} microbatches in {chunks} "
            f"chunks needs at least {smallest}"
        )
    return cap


def _refuse_what_zeropp_lacks(settings: Settings) -> None:
    refusals = {
        "tp": (
            settings.tp != 1,
            "ZeroPP has no tensor parallelism (use contender.tp=1; contender.shard takes its "
            "place)",
        ),
        "schedule": (
            settings.schedule not in ("auto", "zeropp"),
            "zeropp runs its own schedule (use auto)",
        ),
        "compile": (
            settings.compile,
            "not supported with deferred weight gradients (use false)",
        ),
    }
    for field, (refused, way_out) in refusals.items():
        if refused:
            value = getattr(settings, field)
            raise InfeasibleError(f"contender.{field}={value}: {way_out}")
