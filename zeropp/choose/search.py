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
from itertools import chain
from time import process_time
from typing import Generic, NamedTuple

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
from zeropp.schedule.plan import Draft, Plan, SizedPlan
from zeropp.schedule.program import collector_paused
from zeropp.types.layout import InfeasibleError
from zeropp.types.literals import Auto


def adds_later(plan: SizedPlan) -> bool:
    """Whether gradients that are reduced over the shards are added to those of earlier units. It is
    the one thing besides the family on which the price of a member depends."""
    return plan.num_units > 1 and plan.reduce_every == "unit"


class Member(NamedTuple, Generic[K]):
    """A member of a family that may fit into memory."""

    candidate: Candidate[K]
    plan: SizedPlan
    held: StepBytes


@dataclass(frozen=True, eq=False, slots=True)
class QueueEntry(Generic[K]):
    """An entry of the queue: a family with the bound of its compute, a family with its durations,
    or a member with its price."""

    bound_s: float
    number: int  # unique
    candidate: Candidate[K]
    alike: object  # the same for families that differ only in how data-parallel ranks are used
    turn: int = 0  # those of a lower turn come first, whatever their bounds
    _: KW_ONLY
    plan: SizedPlan | None = None  # None: not sized yet
    times: StepTimes | None = None
    members: Iterable[Member[K]] = ()  # of a family with its durations; read once
    price: PlanPrice | None = None  # of a member

    def __lt__(self, other: QueueEntry[K]) -> bool:
        """Whether this entry comes first: by its turn, by its bound, or as the older one."""
        return (self.turn, self.bound_s, self.number) < (other.turn, other.bound_s, other.number)


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


@dataclass(frozen=True, kw_only=True)
class OrdersResult:
    """What was found about the orders of one plan."""

    best: SimResult | None  # the fastest order that fits, if it is fast enough
    simulated: bool  # at least one order was simulated
    some_large: bool  # at least one order does not fit into memory
    all_large: bool  # no order fits on the first and the last rank


def try_orders(
    drafts: Iterable[Draft],
    plan: SizedPlan,
    price: PlanPrice,
    *,
    limit_bytes: int,
    slowest_s: float,
) -> OrdersResult:
    """Simulate every order that may take less than ``slowest_s`` seconds and whose first and last
    rank, usually the fullest, hold at most ``limit_bytes``."""
    best: SimResult | None = None
    simulated, large, tried = False, 0, 0
    ends = {0, plan.schedule.num_ranks - 1}
    for draft in drafts:
        tried += 1
        if draft.compute:
            if exceeds(draft.compute, plan, price, limit_bytes):
                large += 1
                continue
            if least_of_order_s(draft.compute, plan, price, slowest_s) >= slowest_s:
                continue
        whole = draft.complete()
        if not _fits(whole, price, ends, limit_bytes):
            large += 1
            continue
        simulated = True
        result = simulate_within(whole, price, slowest_s)
        if result is None or result.step_s >= slowest_s:
            continue
        if _fits(whole, price, range(whole.schedule.num_ranks), limit_bytes):
            best, slowest_s = result, result.step_s
        else:
            large += 1
    return OrdersResult(
        best=best,
        simulated=simulated,
        some_large=large > 0,
        all_large=large == tried and not simulated,
    )


def _fits(plan: Plan, price: PlanPrice, ranks: Iterable[int], limit_bytes: int) -> bool:
    return all(fits(plan, price, rank, limit_bytes) for rank in ranks)


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
    tuning = _Search(task, contender, asked or contender.knobs(), budget_s=budget_s)
    for candidate in known:
        tuning.offer(candidate)
    return tuning.run(microbatch_size, tolerance, runner_up)


def _one_of_alike(
    families: Iterable[QueueEntry[K]],
) -> tuple[list[QueueEntry[K]], dict[object, list[QueueEntry[K]]]]:
    """(a queue with one family of those that are alike, that with the most shards, which holds
    least; the others)."""
    others: dict[object, list[QueueEntry[K]]] = {}
    for entry in families:
        others.setdefault(entry.alike, []).append(entry)
    queue = []
    for alike in others.values():
        most = max(range(len(alike)), key=lambda number: _shards(alike[number].candidate.knobs))
        queue.append(alike.pop(most))
    heapq.heapify(queue)
    return queue, {key: alike for key, alike in others.items() if alike}


def _shards(knobs: object) -> tuple[int, int]:
    return getattr(knobs, "shard", 1), getattr(knobs, "replicate_zero", 0)


class _Search(Generic[K]):
    """One search, with its queue of entries; the lowest bound is first."""

    def __init__(
        self,
        task: Task,
        contender: Contender[K],
        asked: K,
        *,
        budget_s: float,
    ) -> None:
        self._ends = process_time() + budget_s
        self._gives_up = process_time() + _PATIENCE * budget_s
        self._hurry_at = process_time() + budget_s / 2  # if nothing has been found by then
        self._task = task
        self._contender = contender
        self._asked = asked
        self._outcome = Outcome(task, contender)
        self._limit = task.limit_bytes
        # Of families alike, those with too many activations.
        self._too_many_activations: set[object] = set()

    def offer(self, candidate: Candidate[K]) -> None:
        """Simulate a candidate, and keep it if it fits and is the best so far."""
        if evaluated := self._fitting(candidate):
            self._outcome.offer(evaluated)

    def run(self, microbatch_size: int | Auto, tolerance: float, runner_up: bool) -> Outcome[K]:
        """Take the first entry of the queue, until no bound is below the winner."""
        outcome = self._outcome
        known = outcome.winner
        queue, others = _one_of_alike(self._families(microbatch_size))
        number = len(queue) + sum(map(len, others.values()))
        while queue or others:
            if not queue:
                queue = [*chain.from_iterable(others.values())]
                heapq.heapify(queue)
                others.clear()
            entry = heapq.heappop(queue)
            to_beat = outcome.to_beat(runner_up)
            if entry.bound_s >= to_beat * (1.0 - tolerance):
                outcome.rejected[SLOWER] += 1
                continue
            if process_time() > (self._ends if outcome.winner else self._gives_up):
                outcome.is_complete = False
                break
            if outcome.winner is known and process_time() > self._hurry_at:
                self._hurry_at = float("inf")
                queue = self._recomputed_first([entry, *queue])
                continue
            if entry.price is not None:
                before = outcome.winner
                self._evaluate(entry, outcome.slowest(runner_up))
                if outcome.winner is not before:
                    for other in others.pop(entry.alike, ()):
                        heapq.heappush(queue, other)
                continue
            for child in self._opened(entry, number):
                number += 1
                heapq.heappush(queue, child)
        self._recompute_less()
        return outcome

    def _recomputed_first(self, queue: list[QueueEntry[K]]) -> list[QueueEntry[K]]:
        """The queue with those first that recompute the most blocks in full, of these those of the
        fewest sequences per microbatch: most of what fits is there, where little does."""
        sized = []
        for entry in queue:
            if plan := entry.plan or self._sized(entry.candidate):
                blocks = sum(plan.recomputed_per_stage) * (plan.recompute == "full")
                size = (blocks, -entry.candidate.microbatch_size)
                sized.append((size, replace(entry, plan=plan)))
        most = max((size for size, _ in sized), default=None)
        queue = [replace(entry, turn=-(size == most)) for size, entry in sized]
        heapq.heapify(queue)
        return queue

    def _recompute_less(self) -> None:
        """Recompute as few blocks as fit in the winner.

        The search tries half of them, and all. More recomputed blocks need less
        memory, so a bisection finds the fewest. Degrees that would win only with fewer blocks than
        half are missed.
        """
        winner = self._outcome.winner
        if winner is None or winner.plan.recompute == "none":
            return
        asked, found = (
            getattr(knobs, "recompute_blocks", None)
            for knobs in (self._asked, winner.candidate.knobs)
        )
        if asked != "auto" or not isinstance(
            found, int
        ):  # set by the user, or all that the contender can
            return
        fewest, most = 1, found
        while fewest < most:
            tried = (fewest + most) // 2
            knobs = replace(winner.candidate.knobs, recompute_blocks=tried)  # type: ignore[type-var]
            evaluated = self._fitting(replace(winner.candidate, knobs=knobs))
            if evaluated:
                most = tried
                self._outcome.offer(evaluated)
            else:
                fewest = tried + 1

    def _fitting(self, candidate: Candidate[K]) -> Evaluated[K] | None:
        """The simulated candidate; None if it is infeasible or does not fit the memory."""
        with suppress(InfeasibleError):
            result = self._contender.simulated(self._task, candidate)
            if result.peak_bytes <= self._limit:
                return Evaluated(candidate, result)
        return None

    def _families(self, microbatch_size: int | Auto) -> Iterator[QueueEntry[K]]:
        """Every family for which the planner has a plan, with the cheapest bound."""
        space, prices = self._contender.space, self._contender.prices
        rejected = self._outcome.rejected
        of_compute = compute_knobs(self._contender.knobs)
        bounds: dict[object, float] = {}
        number = 0
        for point, size in points(
            self._task, space, self._asked, microbatch_size, rejected=rejected
        ):
            for knobs in space.families(point):
                candidate, plan = Candidate(knobs, size), None
                alike = (size, point.num_microbatches, of_compute(knobs))
                if alike not in bounds:
                    plan = self._sized(candidate)
                    if plan is None:
                        continue
                    bounds[alike] = least_compute_s(plan, prices.passes(plan, self._task.cluster))
                number += 1
                yield QueueEntry(bounds[alike], number, candidate, alike, plan=plan)

    def _sized(self, candidate: Candidate[K]) -> SizedPlan | None:
        try:
            return self._contender.size(self._task, candidate.knobs, candidate.microbatch_size)
        except InfeasibleError as error:
            self._outcome.rejected[error.kind] += 1
            return None

    def _opened(self, entry: QueueEntry[K], number: int) -> Iterator[QueueEntry[K]]:
        """The entries that replace a family: the family with its durations, or its members."""
        cluster = self._task.cluster
        if entry.alike in self._too_many_activations:
            self._outcome.rejected[OOM] += 1
            return
        family = entry.plan or self._sized(entry.candidate)
        if family is None:
            return
        if entry.times is None:
            members = self._that_may_fit(entry, family)
            first = next(members, None)  # the others are sized when the family comes up again
            if first:
                times = self._contender.prices.times(family, cluster)
                opened = replace(entry, plan=family, times=times, members=chain((first,), members))
                yield replace(opened, bound_s=least_step_s(family, times), number=number + 1)
            return
        durations = {adds_later(family): entry.times}
        for candidate, plan, held in entry.members:
            later = adds_later(plan)
            if later not in durations:
                durations[later] = self._contender.prices.times(plan, cluster)
            price = PlanPrice(**vars(durations[later]), **vars(held))
            number += 1
            bound = entry.bound_s if plan is family else least_step_s(plan, price)
            yield replace(
                entry,
                bound_s=bound,
                number=number,
                candidate=candidate,
                plan=plan,
                members=(),
                times=price,
                price=price,
            )

    def _that_may_fit(self, entry: QueueEntry[K], family: SizedPlan) -> Iterator[Member[K]]:
        """The members of a family whose least bytes fit, each sized when it is asked for. Bytes are
        cheaper to find than durations, and where memory is scarce most families have no such
        member; where it is not, the first one fits usually."""
        of_sums: dict[bool, StepBytes] = {}
        for candidate, member in self._members(entry.candidate, family):
            later = adds_later(member)
            is_first = not of_sums
            if later not in of_sums:
                of_sums[later] = self._contender.prices.memory(member, self._task.cluster)
            if least_bytes(member, of_sums[later]) <= self._limit:
                yield Member(candidate, member, of_sums[later])
                continue
            self._outcome.rejected[OOM] += 1
            if is_first and self._too_large(entry.alike, member, of_sums[later]):
                return

    def _too_large(self, alike: object, first: SizedPlan, held: StepBytes) -> bool:
        """Whether no member of a family fits; ``first`` is the one with the fewest activations; if
        these alone are too many, no family fits that is ``alike``."""
        if least_of_family(first, held) <= self._limit:
            return False
        if least_of_alike(first, held) > self._limit:
            self._too_many_activations.add(alike)
        return True

    def _members(
        self, family: Candidate[K], plan: SizedPlan
    ) -> Iterator[tuple[Candidate[K], SizedPlan]]:
        for knobs in self._contender.space.members(self._asked, family.knobs, plan):
            if knobs is family.knobs:
                yield family, plan
                continue
            member = replace(family, knobs=knobs)
            sized = self._sized(member)
            if sized is not None:
                yield member, sized

    def _evaluate(self, entry: QueueEntry[K], slowest: float) -> None:
        """Simulate a member in all orders. The fastest that fits counts, if it takes less than
        ``slowest`` seconds."""
        outcome, plan, price = self._outcome, entry.plan, entry.price
        assert plan is not None
        assert price is not None
        uncapped = replace(plan, activation_cap=0)
        cap = plan.activation_cap or plan.num_microbatches * plan.layout.chunks
        if cap >= outcome.too_large.get(uncapped, cap + 1):
            outcome.rejected[OOM] += 1
            return
        too_large = partial(exceeds, plan=plan, held=price, limit_bytes=self._limit)
        try:
            drafts = self._contender.orders(plan, price.stages, too_large)
            tried = try_orders(drafts, plan, price, limit_bytes=self._limit, slowest_s=slowest)
        except InfeasibleError as error:
            outcome.rejected[error.kind] += 1
            return
        outcome.simulated += tried.simulated
        if tried.best:
            outcome.offer(Evaluated(entry.candidate, tried.best))
        elif tried.some_large:
            outcome.rejected[OOM] += 1
            if tried.all_large:
                outcome.too_large[uncapped] = cap
