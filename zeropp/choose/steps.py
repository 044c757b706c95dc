"""The simulated steps of one candidate: its fastest order, the largest activation cap that fits,
and the time of a long step by two shorter ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Any

from zeropp.choose.bounds import exceeds, largest_cap, least_of_order_s, order_peak
from zeropp.choose.contender import Contender
from zeropp.price import PlanPrice, StepBytes
from zeropp.price.peak_memory import needed_bytes
from zeropp.price.simulator import SimResult, simulate_within
from zeropp.schedule.legality import live_activations
from zeropp.schedule.plan import Plan, SizedPlan
from zeropp.schedule.program import Schedule
from zeropp.schedule.zeropp_order import smallest_cap

_FILLED = 2  # units in which a rank fills its memory
_REPEATS = 3  # periods of a step after which it repeats itself
_STEADY = 1e-3  # share by which two periods may differ
_TOLD = 1e-3  # share by which a step may be shorter than shorter ones tell


@dataclass(frozen=True, kw_only=True)
class Steps:
    """The simulated steps of a contender's plans. ``asks_cap``: an activation cap that does not fit
    is lowered until it does."""

    contender: Contender[Any]
    limit_bytes: int
    asks_cap: bool

    def with_least_cap(self, plan: SizedPlan) -> SizedPlan:
        """The plan with the smallest activation cap that it may get here."""
        if not self.asks_cap:
            return plan
        order = plan.schedule
        sizes = plan.layout.chunks, order.num_microbatches, order.unit
        cap = smallest_cap(*sizes, plan.merged_microbatches)
        return replace(plan, activation_cap=cap)

    def capped(self, plan: SizedPlan, price: StepBytes) -> SizedPlan | None:
        """The plan with the largest cap up to its own that may fit; None if there is none."""
        if not self.asks_cap:
            return plan
        capped = replace(plan, activation_cap=largest_cap(plan, price, self.limit_bytes))
        least = self.with_least_cap(plan).activation_cap
        return capped if capped.activation_cap >= least else None

    def begun(self, plan: SizedPlan, price: PlanPrice) -> SizedPlan | int:
        """The plan with the largest cap up to its own with which the beginning of its first order
        fits on the first and the last rank; if there is none, the bytes by which it does not."""
        if not self.asks_cap:
            return plan
        ranks = plan.schedule.num_ranks
        short = plan.shortened(min(plan.num_microbatches, _FILLED * plan.schedule.unit + ranks))
        while True:
            order = next(self.contender.orders(short, None, None)).compute
            assert order is not None
            peak, rank = order_peak(order, short, price, {0, ranks - 1})
            if peak <= self.limit_bytes:
                return replace(plan, activation_cap=short.activation_cap)
            lower = self._lower(short, order, price, rank, peak)
            if isinstance(lower, int):
                return lower
            short = lower

    def told(self, plan: SizedPlan, price: PlanPrice) -> tuple[SizedPlan | None, float]:
        """The plan, with a cap that fits, and its seconds by three shorter steps: the actions of
        more microbatches repeat themselves. 0 s where a step is not long, or where two more periods
        of it do not take the same time; no plan where no order fits."""
        m, period = plan.num_microbatches, plan.period
        few = m % period + _REPEATS * period
        if m < 2 * few:
            return plan, 0.0
        best: tuple[SizedPlan | None, float] = None, 0.0
        for short, results in self._tried(plan.shortened(few), price, inf):
            less, more = (
                self.contender.orders(short.shortened(few + sign * period), price.stages, None)
                for sign in (-1, 1)
            )
            told = []
            for result, *orders in zip(results, less, more, strict=False):
                if not isinstance(result, SimResult):
                    continue
                shorter, longer = (
                    simulate_within(order.complete(), price, inf) for order in orders
                )
                assert shorter
                assert longer
                period_s = longer.step_s - result.step_s
                steady = abs(result.step_s - shorter.step_s - period_s) <= _STEADY * period_s
                repeats = (m - few) / period - 1
                told.append(steady * (longer.step_s + repeats * period_s))
            if told and (not best[0] or min(told) < best[1]):
                best = replace(plan, activation_cap=short.activation_cap), min(told) * (1 - _TOLD)
        return best

    def fastest(
        self, plan: SizedPlan, price: PlanPrice, slowest_s: float
    ) -> tuple[SimResult | None, int]:
        """The step in its fastest order that fits on all ranks, None if none takes less than
        ``slowest_s``; and by how many bytes one that does take less does not fit, 0 if none."""
        best, over = None, 0
        for _, results in self._tried(plan, price, slowest_s):
            excesses = [result for result in results if isinstance(result, int)]
            over = min([over, *excesses] if over else excesses, default=0)
            for result in results:
                if isinstance(result, SimResult) and result.step_s < slowest_s:
                    best, slowest_s = result, result.step_s
        return best, over

    def _tried(
        self, plan: SizedPlan, price: PlanPrice, slowest_s: float
    ) -> Iterator[tuple[SizedPlan, list[SimResult | int | None]]]:
        """The plan with its cap, and with lower ones as long as some order does not fit, each with
        the simulated step of every order; None for one that takes ``slowest_s`` or the time of
        another; for one that does not fit, the bytes by which it does not."""
        lower: SizedPlan | int = plan
        while isinstance(lower, SizedPlan):
            plan, lower = lower, 0
            results: list[SimResult | int | None] = []
            too_large = partial(exceeds, plan=plan, held=price, limit_bytes=self.limit_bytes)
            actions = 0  # of the first rank
            for draft in self.contender.orders(plan, price.stages, too_large):
                results.append(None)
                order = draft.compute
                made = len(order.programs[0]) if order else 0
                actions = max(actions, made)
                if order and least_of_order_s(order, plan, price, slowest_s) >= slowest_s:
                    continue
                if order and made < actions:  # the beginning of one too large
                    peak, rank = order_peak(order, plan, price, {0, order.num_ranks - 1})
                    if not isinstance(lower, SizedPlan):
                        lower = self._lower(plan, order, price, rank, peak)
                    results[-1] = peak - self.limit_bytes
                    continue
                # Most orders that win nothing are told sooner by their time than by their bytes.
                whole = draft.complete()
                result = simulate_within(whole, price, slowest_s)
                if result is None or result.step_s >= slowest_s:
                    continue
                if full := self._fullest(whole, price):
                    if not isinstance(lower, SizedPlan):
                        lower = self._lower(plan, whole.schedule, price, *full)
                    results[-1] = full[1] - self.limit_bytes
                    continue
                results[-1] = result
                if slowest_s < inf:
                    slowest_s = min(slowest_s, result.step_s)
            yield plan, results

    def _fullest(self, whole: Plan, price: PlanPrice) -> tuple[int, int] | None:
        """A rank that holds too much, and its peak."""
        last = whole.schedule.num_ranks - 1
        for rank in sorted(range(last + 1), key=lambda r: 0 < r < last):  # usually an end
            if (peak := needed_bytes(whole, price, rank)) > self.limit_bytes:
                return rank, peak
        return None

    def _lower(
        self, plan: SizedPlan, order: Schedule, price: PlanPrice, rank: int, peak: int
    ) -> SizedPlan | int:
        """The plan with the next cap to try where a rank holds too much; if there is none, the
        bytes by which it does at least with the smallest one."""
        over = peak - self.limit_bytes
        if not self.asks_cap:
            return over
        largest = max(price.memory[stage].activations for stage in plan.schedule.stages_of(rank))
        # An order may hold less than it may.
        cap = min(plan.activation_cap, max(live_activations(order, rank)))
        least = self.with_least_cap(plan).activation_cap
        if (lower := cap - max(1, over // largest)) >= least:
            return replace(plan, activation_cap=lower)
        return max(1, over - max(0, cap - least) * largest)
