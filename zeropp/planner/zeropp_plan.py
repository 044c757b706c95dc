"""ZeroPP's planner: from a request to the Plan that the engine runs. Imports no torch.

The order of a step is planned with the durations that the cost model gives the request's cluster,
and the simulator decides between it and the order for equal durations. The tuner calls the same
function, so what it prices is what the engine runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from decimal import ROUND_CEILING, Context
from functools import lru_cache

from zeropp.cluster import Cluster
from zeropp.cost import PlanPrice, balanced_cuts, price_plan
from zeropp.layout import InfeasibleError, Layout
from zeropp.literals import ReduceEvery
from zeropp.plan import Plan, PlanRequest, Settings
from zeropp.planner.degrees import microbatches_per_step, resolve_layout
from zeropp.schedule import lower, validate
from zeropp.schedule.program import Schedule, StageCost, loop_placement
from zeropp.schedule.zeropp_order import candidates, smallest_cap
from zeropp.sim.simulator import SimResult, simulate


def plan_zeropp(request: PlanRequest) -> Plan:
    """PP x ZeRO-3 (x replicas), no tensor parallelism; raises InfeasibleError in one line."""
    settings = request.settings
    _refuse_what_zeropp_lacks(request)
    layout = resolve_layout(request)
    microbatches = microbatches_per_step(request, layout)
    unit = layout.pp if settings.unit == "auto" else settings.unit
    placement = loop_placement(layout.pp, layout.chunks)
    sizes = Schedule("zeropp", microbatches, min(unit, microbatches), placement, ())
    plan = assemble("zeropp", request, layout, sizes)
    price = price_plan(plan, request.cluster)
    cap = _activation_cap(settings, plan, price)
    plan = fastest(orders(plan, cap, price), request.cluster, price).plan
    validate(plan.schedule, activation_cap=cap)
    return plan


def fastest(plans: Iterable[Plan], cluster: Cluster, price: PlanPrice) -> SimResult:
    """The plan with the shortest simulated step, the first of equals; ``price`` is that of all."""
    return min((simulate(plan, cluster, price=price) for plan in plans), key=lambda r: r.step_s)


def assemble(
    program: str,
    request: PlanRequest,
    layout: Layout,
    schedule: Schedule,
    cuts: tuple[int, ...] | None = None,
) -> Plan:
    """The plan of a request, once its degrees and its schedule are known.

    ``program`` is the name of the contender's entry in ``zeropp.programs`` (ValueError where there
    is none); ``cuts`` are by default stages of equal cost. Every contender's planner ends here.
    """
    settings = request.settings
    return Plan(
        contender=settings.name,
        shape=request.shape,
        layout=layout,
        microbatch_size=request.microbatch_size,
        schedule=schedule,
        cuts=cuts or balanced_cuts(request.shape, schedule.num_stages),
        program=program,
        precision=request.precision,
        recompute=settings.recompute,
        reduce_every=settings.reduce_every,
        replicate_every=settings.replicate_every,
        reduce_dtype=settings.reduce_dtype,
        prefetch=settings.prefetch,
        keep=settings.keep,
        compile=settings.compile,
    )


def refuse(
    settings: Settings, refusals: Mapping[str, tuple[bool, str]], contender: str = ""
) -> None:
    """Raise InfeasibleError for the first field that is refused; ``refusals`` give for a field
    whether it is, and why, with a way out."""
    who = f"{contender}: " if contender else ""
    for field, (refused, why) in refusals.items():
        if refused:
            value = getattr(settings, field)
            raise InfeasibleError(f"contender.{field}={value}: {who}{why}")


@dataclass(frozen=True)
class Sizes:
    """What sets the programs of a ZeroPP step, durations aside."""

    num_ranks: int
    chunks: int
    num_microbatches: int
    unit: int
    activation_cap: int  # chunk-activations
    gather: bool
    prefetch: int = 1
    keep: int = 0
    reduce_every: ReduceEvery = "unit"


@lru_cache(maxsize=128)
def programs(sizes: Sizes, costs: tuple[StageCost, ...] | None = None) -> tuple[Schedule, ...]:
    """Whole programs to choose from: the order for equal durations, and one planned with
    ``costs``. Many plans that differ in other degrees share them."""
    found = candidates(
        sizes.num_ranks,
        sizes.chunks,
        sizes.num_microbatches,
        sizes.unit,
        sizes.activation_cap,
        costs,
    )
    return tuple(
        lower(
            order,
            gather=sizes.gather,
            prefetch=sizes.prefetch,
            keep=sizes.keep,
            reduce_every=sizes.reduce_every,
        )
        for order in found
    )


def orders(plan: Plan, activation_cap: int, price: PlanPrice | None = None) -> tuple[Plan, ...]:
    """A ZeroPP plan of sizes alone with each of the programs to choose from, all of which keep
    the cap (chunk-activations); without a price that for equal durations alone."""
    sizes = Sizes(
        plan.layout.pp,
        plan.layout.chunks,
        plan.num_microbatches,
        plan.schedule.unit,
        activation_cap,
        plan.gathers,
        plan.prefetch,
        plan.keep,
        plan.reduce_every,
    )
    # No order is planned with gathers and reductions, and without them more plans are alike.
    none = {"unshard": 0.0, "reduce_grad": 0.0, "copy_out": 0.0, "copy_in": 0.0}
    costs = tuple(replace(cost, **none) for cost in price.stages) if price else None
    return tuple(replace(plan, schedule=schedule) for schedule in programs(sizes, costs))


def _activation_cap(settings: Settings, plan: Plan, price: PlanPrice) -> int:
    """Live chunk-activations a rank; a cap in GiB holds as many of the largest chunk's."""
    unit, chunks = plan.schedule.unit, plan.layout.chunks
    smallest = smallest_cap(chunks, plan.num_microbatches, unit)
    needs = f"a unit of {unit} microbatches in {chunks} chunks needs at least {smallest}"
    if settings.activation_cap_gib != "auto":
        gib = max(max(m.activations, m.deferred) for m in price.memory) / 2**30
        cap = min(int(settings.activation_cap_gib // gib), plan.num_microbatches * chunks)
        if cap < smallest:
            enough = Context(prec=2, rounding=ROUND_CEILING).create_decimal(smallest * gib)
            raise InfeasibleError(
                f"contender.activation_cap_gib={settings.activation_cap_gib}: holds {cap} "
                f"chunk-activations, but {needs} (use {enough:f} or more)"
            )
        return cap
    cap = unit * chunks if settings.activation_cap == "auto" else settings.activation_cap
    if cap < smallest:
        raise InfeasibleError(f"contender.activation_cap={cap}: {needs}")
    return cap


def _refuse_what_zeropp_lacks(request: PlanRequest) -> None:
    settings = request.settings
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
        "keep": (settings.keep < 0, "must be at least 0"),
        "activation_cap_gib": (
            settings.activation_cap_gib != "auto" and settings.activation_cap != "auto",
            f"contender.activation_cap={settings.activation_cap} sets it too (set one to auto)",
        ),
        "compile": (
            settings.compile and request.shape.dropout > 0,
            "compiled blocks draw dropout from a generator of their own (use false, or "
            "model.dropout=0)",
        ),
    }
    refuse(settings, refusals)
