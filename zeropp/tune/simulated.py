"""Simulates a plan in each of its orders, and keeps the fastest that fits into memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from zeropp.cost import PlanPrice
from zeropp.plan import Plan
from zeropp.sim.memory_curve import fits
from zeropp.sim.simulator import SimResult, simulate_within


@dataclass(frozen=True, kw_only=True)
class Order:
    """An order of a plan's actions, with lower bounds that take less time than to complete it."""

    is_too_large: Callable[[], bool]  # whether it certainly does not fit into memory
    least_s: Callable[[float], float]  # the seconds of a step; infinite if not below the argument
    complete: Callable[[], Plan]


@dataclass(frozen=True, kw_only=True)
class Tried:
    """What was found about the orders of one plan."""

    best: SimResult | None  # the fastest order that fits, if it is fast enough
    simulated: bool  # at least one order was simulated
    some_large: bool  # at least one order does not fit into memory
    all_large: bool  # no order fits on the first and the last rank


def try_orders(
    orders: Iterable[Order], price: PlanPrice, *, limit_bytes: int, slowest_s: float
) -> Tried:
    """Simulate every order that may take less than ``slowest_s`` seconds and whose first and last
    rank, as a rule the fullest, hold at most ``limit_bytes``."""
    best: SimResult | None = None
    simulated, large, tried = False, 0, 0
    for order in orders:
        tried += 1
        if order.is_too_large():
            large += 1
            continue
        if order.least_s(slowest_s) >= slowest_s:
            continue
        plan = order.complete()
        ranks = range(plan.schedule.num_ranks)
        if not _fits(plan, price, {0, ranks[-1]}, limit_bytes):
            large += 1
            continue
        simulated = True
        result = simulate_within(plan, price, slowest_s)
        if result is None or result.step_s >= slowest_s:
            continue
        if _fits(plan, price, ranks, limit_bytes):
            best, slowest_s = result, result.step_s
        else:
            large += 1
    return Tried(
        best=best,
        simulated=simulated,
        some_large=large > 0,
        all_large=large == tried and not simulated,
    )


def _fits(plan: Plan, price: PlanPrice, ranks: Iterable[int], limit_bytes: int) -> bool:
    return all(fits(plan, price, rank, limit_bytes) for rank in ranks)
