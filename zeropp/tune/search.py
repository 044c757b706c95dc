"""Finds the best feasible configuration of a contender by an exhaustive search, best bound first.

A *family* is a set of configurations that differ only in unit, activation cap and when gradients
are reduced. Its price is that of a single unit; reductions after each of several units cost more.
Families wait in a queue, sorted by a lower bound of their step time. The search takes the first
entry again and again: a family is first priced, then replaced by its members, and a member is
simulated. It ends when no bound in the queue is below the best step, so that the winner is the best
configuration. The runner-up is the best of those that were simulated with other degrees.

A configuration that does not fit the memory is dropped without a schedule if its lower bound of
bytes is too large, or if it was too large with a smaller activation cap; otherwise it is dropped
after the peak of its programs is known.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from time import process_time
from typing import Generic

from zeropp.cost import PlanPrice, price_plan
from zeropp.layout import InfeasibleError
from zeropp.literals import Auto
from zeropp.plan import Candidate, K, Plan, SizedPlan, Task
from zeropp.planner.orders import fastest
from zeropp.sim.memory_curve import rank_peak
from zeropp.sim.simulator import SimResult, simulate
from zeropp.tune.bound import WorkBound, least_bytes, least_step_s
from zeropp.tune.contender import Contender
from zeropp.tune.space import points

# The largest gain expected from planning with durations, over the order for equal durations. A plan
# that gains more would be missed; ``schedule_orders.json`` shows 10 % at most, and a test checks
# the factor on a sample of plans of all sizes.
_LARGEST_GAIN = 1.2

OOM = "out of memory"
SLOWER = "slower by its lower bound"


@dataclass(frozen=True)
class Evaluated(Generic[K]):
    """A candidate that was simulated, in the fastest order of its contender's planner."""

    candidate: Candidate[K]
    result: SimResult

    @property
    def plan(self) -> Plan:
        """The plan, with its programs."""
        return self.result.plan

    @property
    def step_s(self) -> float:
        """Seconds of one step."""
        return self.result.step_s

    @property
    def peak_bytes(self) -> int:
        """The peak of the fullest rank in bytes."""
        return self.result.peak_bytes

    @property
    def degrees(self) -> tuple[object, ...]:
        """The degrees, in which winner and runner-up must differ."""
        layout, order = self.plan.layout, self.plan.schedule
        degrees = (layout.pp, layout.tp, layout.shard, layout.replicate)
        return (*degrees, layout.chunks, order.name, self.plan.recompute)


# Called with the number of configurations that are settled, the number known, and the best so far.
Progress = Callable[[int, int, Evaluated[K] | None], None]


@dataclass
class Outcome(Generic[K]):
    """The result of a search. ``fallen`` counts families and members by the reason why they were
    dropped."""

    task: Task
    contender: Contender[K]
    winner: Evaluated[K] | None = None
    runner_up: Evaluated[K] | None = None
    fallen: Counter[str] = field(default_factory=Counter)
    simulated: int = 0
    is_complete: bool = True  # False: the budget ended the search
    too_large: set[SizedPlan] = field(default_factory=set)  # out of memory; larger caps are, too

    def offer(self, new: Evaluated[K]) -> None:
        """Keep a candidate if it is the best, or the best with other degrees than the winner's."""
        if self.winner is None or new.step_s < self.winner.step_s:
            if self.winner is not None and self.winner.degrees != new.degrees:
                self.runner_up = self.winner
            self.winner = new
        elif new.degrees != self.winner.degrees and (
            self.runner_up is None or new.step_s < self.runner_up.step_s
        ):
            self.runner_up = new

    def to_beat(self, runner_up: bool) -> float:
        """The step time above which a configuration cannot change the result: the winner's, or the
        runner-up's if one is wanted."""
        enough = self.winner and (self.runner_up or not runner_up)
        return self.winner.step_s if self.winner and enough else float("inf")


def _adds_later(plan: SizedPlan) -> tuple[bool, bool]:
    """Whether reduced gradients are added to those of earlier units: over the shards, and over the
    replicas. It is the one thing besides the family on which the price of a member depends."""
    several = plan.num_units > 1
    return several and plan.reduce_every == "unit", several and plan.replicate_every == "unit"


@dataclass(frozen=True, order=True, slots=True)
class _Entry(Generic[K]):
    """An entry of the queue: a family with the bound of its work, a family with its price, or a
    member with its own."""

    bound_s: float
    number: int  # unique, so that nothing after it is compared
    candidate: Candidate[K]
    plan: SizedPlan
    price: PlanPrice | None = None
    is_member: bool = False


def search(
    task: Task,
    contender: Contender[K],
    asked: K | None = None,
    microbatch_size: int | Auto = "auto",
    *,
    progress: Progress[K] | None = None,
    tolerance: float = 0.005,
    runner_up: bool = True,
    budget_s: float = float("inf"),
) -> Outcome[K]:
    """Find the winner and the runner-up; both are None if nothing fits.

    ``asked``: knobs, of which those that are ``auto`` are searched; by default all are. A
    configuration is not simulated if its bound is below the winner's step by less than the share
    ``tolerance``, so that no configuration can be faster than the winner by more. ``runner_up``:
    False ends the search as soon as the winner is known. ``budget_s``: seconds of CPU time after
    which the best so far is the winner, if there is one.
    """
    return _Search(task, contender, asked or contender.knobs(), progress, budget_s).run(
        microbatch_size, tolerance, runner_up
    )


class _Search(Generic[K]):
    """One search, with its queue of entries, of which the lowest bound is first."""

    def __init__(
        self,
        task: Task,
        contender: Contender[K],
        asked: K,
        progress: Progress[K] | None,
        budget_s: float,
    ) -> None:
        self._ends = process_time() + budget_s
        self._task = task
        self._contender = contender
        self._asked = asked
        self._progress = progress
        self._outcome = Outcome(task, contender)
        self._limit = task.cluster.device.usable_bytes

    def run(self, microbatch_size: int | Auto, tolerance: float, runner_up: bool) -> Outcome[K]:
        """Take the entry with the lowest bound, until no bound is below the winner."""
        outcome = self._outcome
        queue = list(self._families(microbatch_size))
        heapq.heapify(queue)
        number = len(queue)
        while queue:
            entry = heapq.heappop(queue)
            if self._progress:
                self._progress(number - len(queue), number, outcome.winner)
            to_beat = outcome.to_beat(runner_up)
            if entry.bound_s >= to_beat * (1.0 - tolerance):
                outcome.fallen[SLOWER] += 1 + len(queue)
                break
            if outcome.winner and process_time() > self._ends:
                outcome.is_complete = False
                break
            if entry.is_member:
                self._evaluate(entry, to_beat)
                continue
            for child in self._opened(entry, number):
                number += 1
                heapq.heappush(queue, child)
        self._recompute_less()
        return outcome

    def _recompute_less(self) -> None:
        """Recompute as few blocks per stage as fit in the winner.

        The search tries half of a stage's blocks and all of them. More recomputed blocks need less
        memory, so a bisection finds the fewest. Degrees that would win only with fewer blocks than
        half are missed.
        """
        winner = self._outcome.winner
        if winner is None or winner.plan.recompute == "none" or not self._may_choose_blocks:
            return
        most = max(map(winner.plan.recomputed_blocks, range(winner.plan.schedule.num_stages)))
        if winner.plan.layout.chunks == winner.plan.shape.num_pieces:  # every piece is a stage
            most = sum(map(winner.plan.recomputed_blocks, range(winner.plan.schedule.num_stages)))
        fewest = 1
        while fewest < most:
            tried = (fewest + most) // 2
            knobs = replace(winner.candidate.knobs, recompute_blocks=tried)  # type: ignore[type-var]
            candidate = replace(winner.candidate, knobs=knobs)
            result = self._contender.simulated(self._task, candidate)
            if result.peak_bytes <= self._limit:
                most = tried
                self._outcome.offer(Evaluated(candidate, result))
            else:
                fewest = tried + 1

    @property
    def _may_choose_blocks(self) -> bool:
        """Whether the contender can recompute some blocks of a stage, and their number is
        ``auto``."""
        return getattr(self._asked, "recompute_blocks", None) == "auto"

    def _families(self, microbatch_size: int | Auto) -> Iterator[_Entry[K]]:
        """Every family for which the planner has a plan, with the cheapest bound."""
        space, fallen, number = self._contender.space, self._outcome.fallen, 0
        work_s = WorkBound(self._task.cluster)
        for point, size in points(self._task, space, self._asked, microbatch_size, fallen):
            for knobs in space.families(point):
                candidate = Candidate(knobs, size)
                plan = self._sized(candidate)
                if plan is not None:
                    number += 1
                    yield _Entry(work_s(plan), number, candidate, plan)

    def _sized(self, candidate: Candidate[K]) -> SizedPlan | None:
        try:
            return self._contender.size(self._task, candidate.knobs, candidate.microbatch_size)
        except InfeasibleError as error:
            self._outcome.fallen[error.kind] += 1
            return None

    def _opened(self, entry: _Entry[K], number: int) -> Iterator[_Entry[K]]:
        """The entries that replace a family: the family with its price, or its members."""
        if entry.price is None:
            price = price_plan(entry.plan, self._task.cluster)
            first = next(self._members(entry), None)  # the one with the least memory
            if first is not None and self._may_fit(first[1], price):
                bound = least_step_s(entry.plan, price)
                yield _Entry(bound, number + 1, entry.candidate, entry.plan, price)
            return
        prices = {_adds_later(entry.plan): entry.price}
        for candidate, plan in self._members(entry):
            later = _adds_later(plan)
            if later not in prices:
                prices[later] = price_plan(plan, self._task.cluster)
            if self._may_fit(plan, price := prices[later]):
                number += 1
                bound = least_step_s(plan, price)
                yield _Entry(bound, number, candidate, plan, price, is_member=True)

    def _members(self, entry: _Entry[K]) -> Iterator[tuple[Candidate[K], SizedPlan]]:
        family = entry.candidate
        for knobs in self._contender.space.members(self._asked, family.knobs, entry.plan):
            member = replace(family, knobs=knobs)
            plan = self._sized(member)
            if plan is not None:
                yield member, plan

    def _may_fit(self, plan: SizedPlan, price: PlanPrice) -> bool:
        if least_bytes(plan, price) <= self._limit:
            return True
        self._outcome.fallen[OOM] += 1
        return False

    def _evaluate(self, entry: _Entry[K], to_beat: float) -> None:
        """Simulate a member: first in the order that needs no durations and then, if that is fast
        enough, in the others."""
        outcome, cluster, price = self._outcome, self._task.cluster, entry.price
        assert price is not None
        uncapped = replace(entry.plan, activation_cap=0)
        if uncapped in outcome.too_large:  # members come with the smallest cap first
            outcome.fallen[OOM] += 1
            return
        orders = self._contender.order(entry.plan, entry.candidate.knobs, price)
        simple = next(orders)
        if not self._fits(simple, price):
            outcome.fallen[OOM] += 1
            outcome.too_large.add(uncapped)
            return
        outcome.simulated += 1
        result = simulate(simple, cluster, price=price)
        if result.step_s >= to_beat * _LARGEST_GAIN:
            return
        if others := list(orders):
            result = min(result, fastest(others, cluster, price), key=lambda r: r.step_s)
        if result.peak_bytes > self._limit:
            outcome.fallen[OOM] += 1
            return
        outcome.offer(Evaluated(entry.candidate, result))

    def _fits(self, plan: Plan, price: PlanPrice) -> bool:
        ranks = range(plan.schedule.num_ranks)
        return all(rank_peak(plan, price, rank).total <= self._limit for rank in ranks)
