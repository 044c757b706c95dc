"""Finds the best feasible configuration in a contender's search space, best bound first.

A *family* is a set of configurations that differ only in unit, activation cap and when gradients
are reduced. It is sized with what takes the least time: no member has a smaller bound.
Families wait in a queue, sorted by a lower bound of their step time. Families that differ only in
how data-parallel ranks are used have the same compute, so that one of them is sized for all. The
one with the most shards is in the queue; the others follow when it wins, or when all else is
settled. The search takes the first entry again and again: a family is first priced, if any member
may fit into memory, then replaced by all members that may, and a member is simulated. It ends when
no bound in the queue is below the best step by more than the ``tolerance``. So no configuration of
the space that was not simulated is faster than the winner by more, as far as the bounds hold, with
these limits: of recomputed blocks, half and all are tried, and all numbers for the winner alone;
the rules below drop some configurations; and a budget of time may end the search early. The
runner-up is the best of those that were simulated with other degrees.

A configuration that does not fit the memory is dropped without a schedule if its lower bound of
bytes is too large, or if no order of its planner fitted the first and the last rank with a smaller
activation cap; otherwise it is dropped if no order fits all ranks. A whole family is dropped if no
member can fit, and with it, if the activations alone do not fit, all families that differ only in
how data-parallel ranks are used. As far as the bounds hold, this drops nothing that fits. Where a
planner makes drafts of its orders, one whose compute actions alone take too long is not completed,
and one whose beginning is too large is not planned to its end.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from itertools import chain, count
from time import process_time
from typing import Generic

from zeropp.choose.bounds import (
    exceeds,
    least_bytes,
    least_compute_s,
    least_of_alike,
    least_of_family,
    least_of_order_s,
    least_step_s,
)
from zeropp.choose.contender import Contender
from zeropp.choose.space import compute_knobs, points
from zeropp.choose.task import Candidate, K, Task
from zeropp.price import PlanPrice, StepBytes, StepTimes
from zeropp.price.peak_memory import fits
from zeropp.price.simulator import SimResult, simulate_within
from zeropp.schedule.plan import Plan, SizedPlan
from zeropp.schedule.program import collector_paused
from zeropp.types.layout import InfeasibleError
from zeropp.types.literals import Auto


def adds_later(plan: SizedPlan) -> bool:
    """Whether gradients that are reduced over the shards are added to those of earlier units. It is
    the one thing besides the family on which the price of a member depends."""
    return plan.num_units > 1 and plan.reduce_every == "unit"


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Family(Generic[K]):
    """An entry of the queue: a family, with the bound of its compute."""

    bound_s: float
    number: int  # unique
    candidate: Candidate[K]
    alike: object  # the same for families that differ only in how data-parallel ranks are used
    plan: SizedPlan | None  # None: not sized yet
    turn: int = 0  # those of a lower turn come first, whatever their bounds

    def __lt__(self, other: Family[K]) -> bool:
        """Whether this entry comes first: by its turn, by its bound, or as the older one."""
        return (self.turn, self.bound_s, self.number) < (other.turn, other.bound_s, other.number)

    def opened(self, search: _Search[K]) -> Iterable[Family[K]]:
        """The entries that replace this one: the family with its durations, if any member may
        fit."""
        plan = self.plan or search.sized(self.candidate)
        members = search.that_may_fit(self, plan) if plan else iter(())
        first = next(members, None)  # the others are sized when the family comes up again
        if plan and first:
            times = search.contender.prices.times(plan, search.task.cluster)
            yield Priced(
                bound_s=least_step_s(plan, times),
                number=next(search.numbers),
                candidate=self.candidate,
                alike=self.alike,
                plan=plan,
                turn=self.turn,
                times=times,
                members=chain((first,), members),
            )


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Priced(Family[K]):
    """A family with its durations, and its members that may fit, which are read once."""

    plan: SizedPlan
    times: StepTimes
    members: Iterable[tuple[Candidate[K], SizedPlan, StepBytes]]

    def opened(self, search: _Search[K]) -> Iterable[Family[K]]:
        """The members."""
        prices, cluster = search.contender.prices, search.task.cluster
        durations = {adds_later(self.plan): self.times}
        for candidate, plan, held in self.members:
            later = adds_later(plan)
            if later not in durations:
                durations[later] = prices.times(plan, cluster)
            price = PlanPrice(**vars(durations[later]), **vars(held))
            yield Member(
                bound_s=self.bound_s if plan is self.plan else least_step_s(plan, price),
                number=next(search.numbers),
                candidate=candidate,
                alike=self.alike,
                plan=plan,
                turn=self.turn,
                price=price,
            )


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Member(Family[K]):
    """A member of a family that may fit into memory, with its price."""

    plan: SizedPlan
    price: PlanPrice

    def opened(self, search: _Search[K]) -> Iterable[Family[K]]:
        """Simulate it; if it wins, the families follow that are alike."""
        before = search.outcome.winner
        search.evaluate(self)
        return search.others.pop(self.alike, ()) if search.outcome.winner is not before else ()


_PATIENCE = 4  # budgets after which a search that has found nothing ends
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
        degrees = (layout.pp, layout.tp, layout.context, layout.shard, layout.replicate)
        return (*degrees, layout.chunks, order.name, self.plan.recompute)


@dataclass
class Outcome(Generic[K]):
    """The result of a search. ``rejected`` counts families and members by the reason why they were
    dropped."""

    task: Task
    contender: Contender[K]
    _: KW_ONLY
    winner: Evaluated[K] | None = None
    runner_up: Evaluated[K] | None = None
    rejected: Counter[str] = field(default_factory=Counter)
    simulated: int = 0
    is_complete: bool = True  # False: the budget ended the search
    # Plans without their activation caps, and the smallest cap with which they were out of memory;
    # with larger caps they are, too.
    too_large: dict[SizedPlan, int] = field(default_factory=dict)

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
        """The step time above which a configuration need not be tried: the winner's, once there is
        a runner-up if one is wanted."""
        enough = self.winner and (self.runner_up or not runner_up)
        return self.winner.step_s if self.winner and enough else float("inf")

    def slowest(self, runner_up: bool) -> float:
        """The step time from which on a configuration that was simulated changes nothing."""
        last = self.runner_up if runner_up else self.winner
        return last.step_s if last else float("inf")


@collector_paused()
def search(
    task: Task,
    contender: Contender[K],
    asked: K | None = None,
    microbatch_size: int | Auto = "auto",
    *,
    tolerance: float = 0.005,
    runner_up: bool = True,
    budget_s: float = float("inf"),
    known: Iterable[Candidate[K]] = (),
) -> Outcome[K]:
    """Find the winner and the runner-up; both are None if nothing fits.

    ``asked``: knobs; those that are ``auto`` are searched, and by default all are. A
    configuration is not simulated unless its bound is below the winner's step by more than the
    share ``tolerance``, so no configuration can be faster than the winner by more. ``runner_up``:
    False ends the search as soon as the winner is known. ``budget_s``: seconds of CPU time after
    which the best so far is the winner; where half of it has found nothing new that fits, what
    recomputes most comes first, and where four times as much has not, nothing does. ``known``:
    candidates that are simulated first, such as the winners of an earlier search, so that fewer
    others have a bound below the best.
    """
    budget = _Budget(budget_s)
    tuning = _Search(task, contender, asked or contender.knobs(), runner_up)
    for candidate in known:
        tuning.offer(candidate)
    return tuning.run(microbatch_size, tolerance, budget)


class _Budget:
    """When a search ends, and when it takes first what most likely fits, by its CPU time."""

    def __init__(self, seconds: float) -> None:
        now = process_time()
        self._ends, self._gives_up = now + seconds, now + _PATIENCE * seconds
        self._hurry_at = now + seconds / 2

    def is_over(self, *, found: bool) -> bool:
        """Whether the search ends, where it has ``found`` something that fits or has not."""
        return process_time() > (self._ends if found else self._gives_up)

    def hurries(self) -> bool:
        """Whether half of the time is over, for the first time."""
        if process_time() <= self._hurry_at:
            return False
        self._hurry_at = float("inf")
        return True


def _shards(family: Family[K]) -> tuple[int, int]:
    knobs = family.candidate.knobs
    return getattr(knobs, "shard", 1), getattr(knobs, "replicate_zero", 0)


class _Search(Generic[K]):
    """One search, with its queue of entries; the lowest bound is first."""

    def __init__(self, task: Task, contender: Contender[K], asked: K, runner_up: bool) -> None:
        self.task, self.contender, self._asked = task, contender, asked
        self._wants_runner_up, self._limit = runner_up, task.limit_bytes
        self.outcome = Outcome(task, contender)
        self.numbers = count()
        self.others: dict[object, list[Family[K]]] = {}  # alike, of which one is in the queue
        # Of families alike, those with too many activations.
        self._too_many_activations: set[object] = set()

    def offer(self, candidate: Candidate[K]) -> None:
        """Simulate a candidate, and keep it if it fits and is the best so far."""
        if evaluated := self._fitting(candidate):
            self.outcome.offer(evaluated)

    def run(self, microbatch_size: int | Auto, tolerance: float, budget: _Budget) -> Outcome[K]:
        """Take the first entry of the queue, until no bound is below the winner."""
        outcome, others = self.outcome, self.others
        known = outcome.winner
        for family in self._families(microbatch_size):
            others.setdefault(family.alike, []).append(family)
        # One of those that are alike, that with the most shards, which holds least.
        queue: list[Family[K]] = []
        for alike in others.values():
            queue.append(max(alike, key=_shards))
            alike.remove(queue[-1])
        heapq.heapify(queue)
        while queue or any(others.values()):
            if not queue:
                queue = [*chain.from_iterable(others.values())]
                heapq.heapify(queue)
                others.clear()
            entry = heapq.heappop(queue)
            if entry.bound_s >= outcome.to_beat(self._wants_runner_up) * (1.0 - tolerance):
                outcome.rejected[SLOWER] += 1
            elif budget.is_over(found=outcome.winner is not None):
                outcome.is_complete = False
                break
            elif outcome.winner is known and budget.hurries():
                queue = self._recomputed_first([entry, *queue])
            elif entry.alike in self._too_many_activations and not isinstance(entry, Member):
                outcome.rejected[OOM] += 1
            else:
                for child in entry.opened(self):
                    heapq.heappush(queue, child)
        self._use_less("recompute_blocks")
        self._use_less("offload_blocks")
        return outcome

    def _recomputed_first(self, queue: list[Family[K]]) -> list[Family[K]]:
        """The queue with those first that recompute the most blocks in full, of these those of the
        fewest sequences per microbatch: most of what fits is there, where little does."""
        sized = []
        for entry in queue:
            if plan := entry.plan or self.sized(entry.candidate):
                blocks = sum(plan.recomputed_per_stage) * (plan.recompute == "full")
                size = (blocks, -entry.candidate.microbatch_size)
                sized.append((size, replace(entry, plan=plan)))
        most = max((size for size, _ in sized), default=None)
        queue = [replace(entry, turn=-(size == most)) for size, entry in sized]
        heapq.heapify(queue)
        return queue

    def _use_less(self, name: str) -> None:
        """Recompute, or offload, as few blocks as fit in the winner; ``name`` is the knob.

        The search tries half of them, and all. More such blocks need less
        memory, so a bisection finds the fewest. Degrees that would win only with fewer blocks than
        half are missed.
        """
        winner = self.outcome.winner
        if winner is None:
            return
        asked, found = (getattr(k, name, None) for k in (self._asked, winner.candidate.knobs))
        if asked != "auto" or not isinstance(found, int):  # by the user, or all that it can
            return
        fewest, most = 1, found
        while fewest < most:
            tried = (fewest + most) // 2
            knobs = replace(winner.candidate.knobs, **{name: tried})  # type: ignore[type-var]
            evaluated = self._fitting(replace(winner.candidate, knobs=knobs))
            if evaluated:
                most = tried
                self.outcome.offer(evaluated)
            else:
                fewest = tried + 1

    def _fitting(self, candidate: Candidate[K]) -> Evaluated[K] | None:
        """The simulated candidate; None if it is infeasible or does not fit the memory."""
        with suppress(InfeasibleError):
            result = self.contender.simulated(self.task, candidate)
            if result.fits(self._limit):
                return Evaluated(candidate, result)
        return None

    def _families(self, microbatch_size: int | Auto) -> Iterator[Family[K]]:
        """Every family for which the planner has a plan, with the cheapest bound."""
        space, prices, rejected = self.contender.space, self.contender.prices, self.outcome.rejected
        of_compute = compute_knobs(self.contender.knobs)
        bounds: dict[object, float] = {}
        for point, size in points(
            self.task, space, self._asked, microbatch_size, rejected=rejected
        ):
            for knobs in space.families(point):
                candidate, plan = Candidate(knobs, size), None
                alike = (size, point.num_microbatches, of_compute(knobs))
                if alike not in bounds:
                    plan = self.sized(candidate)
                    if plan is None:
                        continue
                    bounds[alike] = least_compute_s(plan, prices.passes(plan, self.task.cluster))
                yield Family(
                    bound_s=bounds[alike],
                    number=next(self.numbers),
                    candidate=candidate,
                    alike=alike,
                    plan=plan,
                )

    def sized(self, candidate: Candidate[K]) -> SizedPlan | None:
        """The plan of a candidate, if there is one."""
        try:
            return self.contender.size(self.task, candidate.knobs, candidate.microbatch_size)
        except InfeasibleError as error:
            self.outcome.rejected[error.kind] += 1
            return None

    def that_may_fit(
        self, entry: Family[K], family: SizedPlan
    ) -> Iterator[tuple[Candidate[K], SizedPlan, StepBytes]]:
        """The members of a family whose least bytes fit, each sized when it is asked for. Bytes are
        cheaper to find than durations, and where memory is scarce most families have no such
        member; where it is not, the first one fits usually. The first has the fewest activations:
        if these alone are too many, no family fits that is alike."""
        of_sums: dict[bool, StepBytes] = {}
        own = entry.candidate.knobs
        for knobs in self.contender.space.members(self._asked, own, family):
            is_family = knobs is own
            candidate = entry.candidate if is_family else replace(entry.candidate, knobs=knobs)
            plan = family if is_family else self.sized(candidate)
            if plan is None:
                continue
            later, is_first = adds_later(plan), not of_sums
            if later not in of_sums:
                of_sums[later] = self.contender.prices.memory(plan, self.task.cluster)
            held = of_sums[later]
            if least_bytes(plan, held) <= self._limit:
                yield candidate, plan, held
                continue
            self.outcome.rejected[OOM] += 1
            if is_first and least_of_family(plan, held) > self._limit:
                if least_of_alike(plan, held) > self._limit:
                    self._too_many_activations.add(entry.alike)
                return

    def evaluate(self, entry: Member[K]) -> None:
        """Simulate a member in all orders that may be fast enough and whose first and last rank,
        usually the fullest, fit. The fastest that fits on all ranks counts."""
        outcome, plan, price = self.outcome, entry.plan, entry.price
        uncapped = replace(plan, activation_cap=0)
        cap = plan.activation_cap or plan.num_microbatches * plan.layout.chunks
        if cap >= outcome.too_large.get(uncapped, cap + 1):
            outcome.rejected[OOM] += 1
            return
        slowest_s = outcome.slowest(self._wants_runner_up)
        too_large = partial(exceeds, plan=plan, held=price, limit_bytes=self._limit)
        best: SimResult | None = None
        simulated, large, tried = False, 0, 0
        ranks = plan.schedule.num_ranks
        try:
            for draft in self.contender.orders(plan, price.stages, too_large):
                tried += 1
                if draft.compute and too_large(draft.compute):
                    large += 1
                    continue
                if draft.compute and (
                    least_of_order_s(draft.compute, plan, price, slowest_s) >= slowest_s
                ):
                    continue
                whole = draft.complete()
                if not all(fits(whole, price, rank, self._limit) for rank in {0, ranks - 1}):
                    large += 1
                    continue
                simulated = True
                result = simulate_within(whole, price, slowest_s)
                if result is None or result.step_s >= slowest_s:
                    continue
                if all(fits(whole, price, rank, self._limit) for rank in range(ranks)):
                    best, slowest_s = result, result.step_s
                else:
                    large += 1
        except InfeasibleError as error:
            outcome.rejected[error.kind] += 1
            return
        outcome.simulated += simulated
        if best:
            outcome.offer(Evaluated(entry.candidate, best))
        elif large:
            outcome.rejected[OOM] += 1
            if large == tried and not simulated:
                outcome.too_large[uncapped] = cap
