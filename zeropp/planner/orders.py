"""ZeroPP's orders of a step, from which the simulator chooses the fastest. Imports no torch.

One order is planned for equal durations, the other with the durations that the cost model predicts
on the cluster. The planner and the tuner call the same functions, so that what is priced is what
runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter

from zeropp.cluster import Cluster
from zeropp.cost import PlanPrice
from zeropp.plan import Plan, SizedPlan
from zeropp.schedule.build import StepSizes, step_drafts
from zeropp.schedule.program import Schedule
from zeropp.sim.simulator import SimResult, simulate

_step_s = attrgetter("step_s")


def fastest(plans: Iterable[Plan], cluster: Cluster, price: PlanPrice) -> SimResult:
    """The simulated step of the fastest plan that fits the device's memory, or of the fastest one
    if none fits; the first of several. All have one ``price``."""
    results = sorted((simulate(plan, cluster, price=price) for plan in plans), key=_step_s)
    if len(results) == 1:
        return results[0]
    limit = cluster.device.usable_bytes
    fitting = (found for found in results if found.peak_bytes <= limit)
    return next(fitting, results[0])


@dataclass(frozen=True)
class Draft:
    """An order of a plan, of which the compute actions are known; ``complete`` adds gathers,
    reductions and transfers, which takes longer. Of an order that is too large, ``compute`` may be
    the beginning alone."""

    compute: Schedule
    complete: Callable[[], Plan]


def drafts(
    plan: SizedPlan,
    activation_cap: int,
    price: PlanPrice | None = None,
    too_large: Callable[[Schedule], bool] | None = None,
) -> Iterator[Draft]:
    """The orders of a ZeroPP plan to choose from, made one by one: that for equal durations and, if
    a ``price`` is given, those planned with its durations. All keep ``activation_cap``, the largest
    number of chunk-activations that a rank may hold. ``too_large`` says whether compute actions, of
    a whole order or of its beginning, need more memory than there is; such orders need not be
    planned to the end."""
    sizes = StepSizes(
        num_ranks=plan.layout.pp,
        chunks=plan.layout.chunks,
        num_microbatches=plan.num_microbatches,
        unit=plan.schedule.unit,
        activation_cap=activation_cap,
        stage_style=plan.stage_style,
        split_backward=plan.split_backward,
        gather=plan.gathers,
        prefetch=plan.prefetch,
        keep=plan.keep,
        reduce_every=plan.reduce_every,
    )
    # Orders do not depend on gathers and reductions; without these, more plans share cached orders.
    none = {"unshard": 0.0, "reduce_grad": 0.0, "copy_out": 0.0, "copy_in": 0.0}
    costs = tuple(replace(cost, **none) for cost in price.stages) if price else None
    for compute, complete in step_drafts(sizes, costs, too_large):
        yield Draft(compute, partial(_completed, plan, complete))


def _completed(plan: SizedPlan, complete: Callable[[], Schedule]) -> Plan:
    return plan.ordered(complete())
