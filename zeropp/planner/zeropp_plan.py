"""ZeroPP's orders of a step, among which the simulator decides. Imports no torch.

One order is planned for equal durations, the other with the durations that the cost model gives
the cluster. The planner and the tuner call the same functions, so what is priced is what the
engine runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

from zeropp.cluster import Cluster
from zeropp.cost import PlanPrice
from zeropp.literals import ReduceEvery
from zeropp.plan import Plan
from zeropp.schedule import lower
from zeropp.schedule.program import Schedule, StageCost
from zeropp.schedule.zeropp_order import candidates
from zeropp.sim.simulator import SimResult, simulate


def fastest(plans: Iterable[Plan], cluster: Cluster, price: PlanPrice) -> SimResult:
    """The plan with the shortest simulated step, the first of equals; ``price`` is that of all."""
    return min((simulate(plan, cluster, price=price) for plan in plans), key=lambda r: r.step_s)


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
