"""ZeroPP's schedule (arXiv 2402.03791): scheduling units, breadth-first chunks, split backward.

The microbatches of a step form units of U. Inside a unit all of them run through chunk 0, then
chunk 1 ... (and back in reverse), so that a chunk's parameters are gathered once a unit for the
forward phase and once for the backward phase. Input gradients run as early as they can; weight
gradients fill what would be bubbles, also across units. With equal durations F = B = W, U >= P
and the default cap of U*V live chunk-activations the step is at most 1 + (P-1)/(3*m*V) times its
ideal (a test holds it). Where U does not divide m, that holds too with two whole units or more (but
for at most two slots of time, in 36 of 4176 sizes, all with V = 2); with one whole unit and a short
one up to 15 % more was seen.
"""

from __future__ import annotations

from collections.abc import Sequence

from zeropp.schedule.greedy import Orders, Policy, Slot, list_schedule
from zeropp.schedule.passes import lower
from zeropp.schedule.program import Program, Schedule, StageCost, loop_placement
from zeropp.sim import events

_EQUAL_COST_POLICIES = (Policy(), Policy(alternate=True))
# On 150 random plans of the suite's models the best of these is 0.02 % behind the best of ten.
_POLICIES = (Policy(False, 0.1), *(Policy(True, patience) for patience in (0.0, 0.1, 0.25)))


def unit_orders(num_ranks: int, chunks: int, num_microbatches: int, unit: int) -> Orders:
    """Forward and input-gradient order of every rank.

    What is left over of the microbatches makes a short unit. It runs last but one: between whole
    units their passes fill what a short unit leaves of its own, and at the end nothing would.
    """
    units = [
        range(first, min(first + unit, num_microbatches))
        for first in range(0, num_microbatches, unit)
    ]
    if num_microbatches % unit and len(units) > 2:
        units[-2:] = reversed(units[-2:])
    forward, backward = [], []
    for rank in range(num_ranks):
        stages = [chunk * num_ranks + rank for chunk in range(chunks)]
        forward.append(_breadth_first(stages, units))
        backward.append(_breadth_first(stages[::-1], units))
    return Orders(loop_placement(num_ranks, chunks), tuple(forward), tuple(backward))


def smallest_cap(chunks: int, num_microbatches: int, unit: int) -> int:
    """The fewest live chunk-activations with which a unit can turn round: every microbatch of
    the unit in all chunks but the last, and one in the last."""
    return (chunks - 1) * min(unit, num_microbatches) + 1


def candidates(
    num_ranks: int,
    chunks: int,
    num_microbatches: int,
    unit: int,
    activation_cap: int,
    costs: Sequence[StageCost] | None,
) -> tuple[Schedule, ...]:
    """Compute-only schedules to choose from: the order for equal durations, and with ``costs`` the
    best of several that are planned with them, gathers and reductions aside. All keep the cap of
    live chunk-activations a rank; raises ValueError where it is too small for a unit."""
    smallest = smallest_cap(chunks, num_microbatches, unit)
    if activation_cap < smallest:
        raise ValueError(
            f"activation_cap={activation_cap}: a unit of {unit} microbatches and {chunks} chunks "
            f"needs at least {smallest} live chunk-activations"
        )
    orders = unit_orders(num_ranks, chunks, num_microbatches, unit)
    caps = [activation_cap] * num_ranks
    found = [_equal_cost_plan(orders, caps)]
    if costs is not None and set(costs) != {StageCost()}:
        plans = (list_schedule(orders, costs, caps, policy) for policy in _POLICIES)
        found.append(min(plans, key=lambda plan: plan.step_s).programs)
    return tuple(
        Schedule("zeropp", num_microbatches, unit, orders.stage_rank, programs)
        for programs in dict.fromkeys(found)
    )


def cheapest(orders: Sequence[Schedule], costs: Sequence[StageCost] | None) -> Schedule:
    """The one of ``candidates`` that the event loop prices lowest on these costs, gathers and
    reductions included: never worse than the equal-cost order, which is the first."""
    if len(orders) == 1 or costs is None:
        return orders[0]
    gather = any(cost.unshard for cost in costs)
    return min(orders, key=lambda order: events.run(lower(order, gather=gather), costs).step_s)


def _equal_cost_plan(orders: Orders, caps: Sequence[int]) -> tuple[Program, ...]:
    ones = [StageCost()] * len(orders.stage_rank)
    bound = shortest_step(orders, ones)
    best = list_schedule(orders, ones, caps, _EQUAL_COST_POLICIES[0])
    for policy in _EQUAL_COST_POLICIES[1:]:
        if best.step_s <= bound:
            break
        plan = list_schedule(orders, ones, caps, policy)
        best = min(best, plan, key=lambda p: p.step_s)
    return best.programs


def shortest_step(orders: Orders, costs: Sequence[StageCost]) -> float:
    """A bound that no order of these stages on these ranks beats, whatever its memory.

    A rank cannot begin before the first microbatch has come through the stages before its first,
    and then has all its work to do: (P-1) + 3*m*V at unit costs.
    """
    bound, arrival = 0.0, 0.0
    seen: set[int] = set()
    for stage, rank in enumerate(orders.stage_rank):
        if rank not in seen:
            seen.add(rank)
            work = sum(
                costs[s].forward + costs[s].backward_input + costs[s].backward_weight
                for s, _ in orders.forward[rank]
            )
            bound = max(bound, arrival + work)
        arrival += costs[stage].forward
    return bound


def _breadth_first(stages: Sequence[int], units: Sequence[range]) -> tuple[Slot, ...]:
    return tuple((stage, j) for unit in units for stage in stages for j in unit)
