"""ZeroPP's schedule (arXiv 2402.03791): scheduling units, breadth-first chunks, split backward.

The microbatches of a step form units of U. Inside a unit all of them run through chunk 0, then
chunk 1 ... (and back in reverse), so that a chunk's parameters are gathered once a unit for the
forward phase and once for the backward phase. Input gradients run as early as they can; weight
gradients fill what would be bubbles, also across units. With equal durations F = B = W, U >= P
and the default cap of U*V live chunk-activations the step is at most 1 + (P-1)/(3*m*V) times its
ideal, whether U divides m or not (a test holds it).
"""

from __future__ import annotations

from collections.abc import Sequence

from zeropp.schedule.action import collector_paused
from zeropp.schedule.greedy import Orders, Planned, Policy, Slot, list_schedule
from zeropp.schedule.program import Schedule, StageCost, loop_placement

_EQUAL_COST_POLICIES = (Policy(), Policy(alternate=True))
# On 250 random plans of the suite's models the best of these is 0.05 % behind the best of twelve.
_POLICIES = tuple(Policy(alternate=True, patience=patience) for patience in (0.0, 0.25, 0.5))


def unit_orders(num_ranks: int, chunks: int, num_microbatches: int, unit: int) -> Orders:
    """Forward and input-gradient order of every rank; what is left over of the microbatches makes
    a short last unit."""
    units = [
        range(first, min(first + unit, num_microbatches))
        for first in range(0, num_microbatches, unit)
    ]
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


@collector_paused()
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
    found = [_equal_cost_plan(orders, activation_cap)]
    if costs is not None and set(costs) != {StageCost()}:
        plans = (list_schedule(orders, costs, activation_cap, policy) for policy in _POLICIES)
        best = min(plans, key=lambda plan: plan.step_s)
        if best.kinds != found[0].kinds:
            found.append(best)
    return tuple(
        Schedule("zeropp", num_microbatches, unit, orders.stage_rank, plan.programs())
        for plan in found
    )


def _equal_cost_plan(orders: Orders, cap: int) -> Planned:
    """The order for equal durations; the next policy is tried where a rank stands still longer
    than the first microbatch needs to come to it."""
    ones = [StageCost()] * len(orders.stage_rank)
    bound = len(orders.forward) - 1 + 3 * len(orders.forward[0])
    best = list_schedule(orders, ones, cap, _EQUAL_COST_POLICIES[0])
    for policy in _EQUAL_COST_POLICIES[1:]:
        if best.step_s <= bound:
            break
        best = min(best, list_schedule(orders, ones, cap, policy), key=lambda plan: plan.step_s)
    return best


def _breadth_first(stages: Sequence[int], units: Sequence[range]) -> tuple[Slot, ...]:
    return tuple((stage, j) for unit in units for stage in stages for j in unit)
