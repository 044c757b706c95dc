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
from itertools import product

from zeropp.schedule.action import collector_paused
from zeropp.schedule.greedy import Orders, Planned, Policy, Slot, list_schedule
from zeropp.schedule.program import Schedule, StageCost, loop_placement

_EQUAL_COST_POLICIES = (Policy(), Policy(alternate=True))
# More of them gain next to nothing and take their time.
_POLICIES = tuple(Policy(alternate=True, patience=patience) for patience in (0.0, 0.25, 0.5))


def unit_orders(
    num_ranks: int, chunks: int, num_microbatches: int, unit: int
) -> tuple[Orders, ...]:
    """Forward and input-gradient orders of all ranks, to choose from. What is left over of the
    microbatches makes a short unit: the last one, or the last but one, where whole units on both
    sides fill what it leaves; which is better depends on durations and cap."""
    in_turn = [
        range(first, min(first + unit, num_microbatches))
        for first in range(0, num_microbatches, unit)
    ]
    sequences = [in_turn]
    if num_microbatches % unit and len(in_turn) > 2:
        sequences.append([*in_turn[:-2], in_turn[-1], in_turn[-2]])
    return tuple(_orders_of(num_ranks, chunks, units) for units in sequences)


def _orders_of(num_ranks: int, chunks: int, units: Sequence[range]) -> Orders:
    stages = [range(rank, num_ranks * chunks, num_ranks) for rank in range(num_ranks)]
    return Orders(
        loop_placement(num_ranks, chunks),
        tuple(_breadth_first(mine, units) for mine in stages),
        tuple(_breadth_first(mine[::-1], units) for mine in stages),
    )


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
        plans = (
            list_schedule(order, costs, activation_cap, policy)
            for order, policy in product(orders, _POLICIES)
        )
        best = min(plans, key=lambda plan: plan.step_s)
        if (best.orders, best.kinds) != (found[0].orders, found[0].kinds):
            found.append(best)
    return tuple(
        Schedule("zeropp", num_microbatches, unit, plan.orders.stage_rank, plan.programs())
        for plan in found
    )


def _equal_cost_plan(orders: Sequence[Orders], cap: int) -> Planned:
    """The order for equal durations; the next policy is tried where a rank stands still longer
    than the first microbatch needs to come to it."""
    num_ranks, stages = len(orders[0].forward), len(orders[0].stage_rank)
    bound = num_ranks - 1 + 3 * len(orders[0].forward[0])
    tried = []
    for order, policy in product(orders, _EQUAL_COST_POLICIES):
        tried.append(list_schedule(order, [StageCost()] * stages, cap, policy))
        if tried[-1].step_s <= bound:
            break
    return min(tried, key=lambda plan: plan.step_s)


def _breadth_first(stages: Sequence[int], units: Sequence[range]) -> tuple[Slot, ...]:
    return tuple((stage, j) for unit in units for stage in stages for j in unit)
