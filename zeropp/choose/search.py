"""Finds the best feasible configuration in a contender's search space, best bound first.

A *family* is a set of configurations that differ only in unit, activation cap and when gradients
are reduced. It is sized with what takes the least time: no member has a smaller bound. Families
wait in a queue, sorted by a lower bound of their step time. Families that differ only in how
data-parallel ranks are used have the same compute, so that one of them is sized for all. Those with
the most shards, and with the most in a node, are in the queue; the others follow when one of them
wins, or when all else is settled. The search takes the first entry again and again: a family is
first priced, if any member may fit into memory, then replaced by all members that may. A member
gets the largest activation cap with which it fits; of a long step, its bound becomes the time that
shorter steps tell; then it is simulated. The search ends when no bound in the queue is below the
best step by more than the ``tolerance``, or with its budget of time: then the lowest bound that is
left gives its *gap*. Last, it climbs: it tries what is beside its winner, as long as that is
faster, and fewer offloaded blocks as long as they fit and take no longer. So no configuration of
the space is faster than the winner by more than gap and tolerance, as far as the bounds hold, with
these limits: of recomputed blocks, half and all are tried, and others beside the winner; of
offloaded blocks, the fewest that fit with the activation cap, and others beside the winner; of
activation caps, the largest that fits, where blocks are offloaded also the least, with which
backwards hide the most stores, and others beside the winner; chunks share buffers as the
contender's ``families`` say. The runner-up is the best of those that were simulated with other
degrees.

A configuration that does not fit the memory is dropped without a schedule if its lower bound of
bytes is too large. A whole family is dropped if no member can fit, and with it, if the activations
alone do not fit, all families that differ only in how data-parallel ranks are used. As far as the
bounds hold, this drops nothing that fits. Where a planner makes drafts of its orders, one whose
compute actions alone take too long is not completed, and one whose beginning is too large is not
planned to its end.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, count
from math import inf
from typing import Any, Generic, cast

from zeropp.choose.bounds import (
    least_bytes,
    least_compute_s,
    least_of_alike,
    least_of_family,
    least_step_s,
)
from zeropp.choose.budget import Budget
from zeropp.choose.contender import Contender
from zeropp.choose.offloading import Offloading, blocks_of, offloads_some
from zeropp.choose.outcome import Evaluated, Outcome
from zeropp.choose.space import (
    SearchPoint,
    compute_knobs,
    neighbours,
    points,
    resized,
    saving_none,
    with_compute_of,
)
from zeropp.choose.steps import Steps
from zeropp.choose.task import Candidate, K, Task
from zeropp.price import PlanPrice, StepBytes, StepTimes
from zeropp.schedule.plan import SizedPlan
from zeropp.schedule.program import collector_paused
from zeropp.types.frozen import replace
from zeropp.types.layout import InfeasibleError
from zeropp.types.literals import Auto


def adds_later(plan: SizedPlan) -> bool:
    """Whether gradients that are reduced over the shards are added to those of earlier units. It is
    the one thing besides the family on which the price of a member depends."""
    return plan.num_units > 1 and plan.reduce_every == "unit"


# Points that differ in data-parallel degrees alone: microbatch size, TP, PP, context.
_Group = tuple[int, ...]
_Alike = tuple[_Group, object]  # a group of points, and the knobs of compute


@dataclass(frozen=True, kw_only=True, eq=False)
class Family(Generic[K]):
    """An entry of the queue: a family, with the bound of its compute."""

    bound_s: float
    number: int  # unique
    asked: K  # knobs; those that are ``auto`` are searched
    candidate: Candidate[K]
    alike: _Alike  # the same for families that differ only in how data-parallel ranks are used
    plan: SizedPlan | None  # None: not sized yet
    forwards: int = 0  # of the step that is simulated, where that takes long
    turn: int = 0  # those of a lower turn come first, whatever their bounds
    # Those that may fit, once it is known that there are some; they are read once.
    members: Iterable[tuple[Candidate[K], SizedPlan, StepBytes]] | None = None

    @property
    def place(self) -> tuple[int, float, int]:
        """The place in the queue: by turn, by bound, the older one first. An entry that takes long
        to simulate comes a little later."""
        return self.turn, self.bound_s * (1 + _DEFERRED * self.forwards), self.number

    def opened(self, search: _Search[K]) -> Iterable[Family[K]]:
        """The entries that replace this one: the family with the bound of its own compute, then, if
        any member may fit, with that of the family that keeps all activations, then with its
        durations; those alike if it cannot be sized."""
        if not self.plan:
            bound_s = search.bound_compute(self.candidate, self.alike)
            if bound_s > self.bound_s:
                yield replace(self, bound_s=bound_s)
                return
        plan = self.plan or search.sized(self.candidate)
        if plan is None:
            yield from search.follow(self.alike)
            return
        if (bound_s := search.bound_keeping_all(plan)) > self.bound_s:
            yield replace(self, bound_s=bound_s, plan=plan)
            return
        members = search.that_may_fit(self, plan)
        first = next(members, None)
        if first is not None:
            members = chain((first,), members)
            plan = search.offloading_least(self, plan)
            times = search.contender.prices.times(plan, search.task.cluster)
            yield Priced(
                bound_s=least_step_s(plan, times, any_unit=True),
                number=next(search.numbers),
                asked=self.asked,
                candidate=self.candidate,
                alike=self.alike,
                plan=plan,
                turn=self.turn,
                times=times,
                members=members,
            )


@dataclass(frozen=True, kw_only=True, eq=False)
class Root(Family[K]):
    """Families that differ only in how they save memory, with the least bound that they may have
    by one that saves none, which is the candidate."""

    point: SearchPoint[K]

    def opened(self, search: _Search[K]) -> Iterable[Family[K]]:
        """The families; of those that are alike the one with the most shards, which holds least."""
        alike = defaultdict[_Alike, list[Family[K]]](list)
        for family in search.families_of(self):
            alike[family.alike].append(family)
        return chain.from_iterable(map(search.first_of, alike.values()))


@dataclass(frozen=True, kw_only=True, eq=False)
class Priced(Family[K]):
    """A family with its durations, and its members that may fit, which are read once."""

    plan: SizedPlan
    times: StepTimes
    members: Iterable[tuple[Candidate[K], SizedPlan, StepBytes]]

    def opened(self, search: _Search[K]) -> Iterable[Family[K]]:
        """The members, each with the bound of its unit."""
        prices, cluster = search.contender.prices, search.task.cluster
        durations = {(adds_later(self.plan), self.plan.offloaded): self.times}
        for candidate, plan, held in self.members:
            key = adds_later(plan), plan.offloaded
            if key not in durations:
                durations[key] = prices.times(plan, cluster)
            price = PlanPrice(**vars(durations[key]), **vars(held))
            yield Member(
                bound_s=max(self.bound_s, least_step_s(plan, price)),
                number=next(search.numbers),
                asked=self.asked,
                candidate=candidate,
                alike=self.alike,
                plan=plan,
                turn=self.turn,
                price=price,
            )


@dataclass(frozen=True, kw_only=True, eq=False)
class Member(Family[K]):
    """A member of a family, with its price. Of one that offloads, the price is that of the fewest
    blocks that any member of the family has."""

    plan: SizedPlan
    price: PlanPrice

    def opened(self, search: _Search[K]) -> Iterable[Family[K]]:
        """The member with the fewest offloaded blocks and with the caps to try, if it may fit."""
        candidate, plan, price = self.candidate, self.plan, self.price
        if offloads_some(self.asked, candidate):
            candidate, plan, held = search.offloading.fewest(candidate)
            times = search.contender.prices.times(plan, search.task.cluster)
            price = PlanPrice(**vars(times), **vars(held))
        capped = Capped(
            bound_s=max(self.bound_s, least_step_s(plan, price)),
            number=self.number,
            asked=self.asked,
            candidate=candidate,
            alike=self.alike,
            plan=plan,
            forwards=plan.num_microbatches * plan.schedule.num_stages,
            turn=self.turn,
            price=price,
        )
        caps = [search.steps.capped(plan, price)]
        if plan.offloaded_stages and caps[0]:
            caps.append(search.steps.with_least_cap(plan))
        for cap in dict.fromkeys(caps):
            yield from search.with_cap(replace(capped, number=next(search.numbers)), cap)


@dataclass(frozen=True, kw_only=True, eq=False)
class Capped(Family[K]):
    """A member that may fit into memory, with its offloaded blocks, activation cap and price."""

    plan: SizedPlan
    price: PlanPrice
    is_begun: bool = False  # the beginning of its step fits
    is_told: bool = False  # of a long step, the bound is the time that shorter ones tell

    def opened(self, search: _Search[K]) -> Iterable[Family[K]]:
        """The member with the largest cap that may fit, then with the time of a long step that
        shorter ones tell. Then it is simulated, and if it wins, the families follow that are
        alike."""
        if not self.is_begun:
            return search.begun(self)
        if not self.is_told:
            return [*search.told(self)] or search.offloading_more(self)
        return search.evaluate(self)


_DEFERRED = 3e-7  # by which share of its bound a candidate is deferred, per forward
# The least share of the bound of a family that saves the least memory that another one has: stages
# are cut anew, and longer passes hide more of ZeRO-3's gathers.
SAVES = 0.98
_SETTLED = 3  # told steps that are simulated after a search was cut
_CLIMBS = 1e-4  # share of a step by which what is beside the winner must be faster
OOM = "out of memory"
SLOWER = "slower by its lower bound"


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
    climbs: float = _CLIMBS,
) -> Outcome[K]:
    """Find the winner and the runner-up; both are None if nothing fits.

    ``asked``: knobs; those that are ``auto`` are searched, and by default all are. A
    configuration is not simulated unless its bound is below the winner's step by more than the
    share ``tolerance``, so none of the space can be faster than the winner by more; other
    values than the space's, such as sizes of buckets, are tried beside the winner. ``runner_up``:
    False ends the search as soon as the winner is known. ``budget_s``: seconds of CPU time after
    which the best so far is the winner; where half of it has found nothing that fits, what
    recomputes most comes first, and where four times as much has not, nothing does. ``known``:
    candidates that are tried first, such as published plans, or the winners of other tasks (with
    as many data-parallel ranks as this one has), so that fewer others have a bound below the best.
    ``climbs``: the share of a step by which what is beside the winner must be faster.
    """
    budget = Budget(budget_s)
    tuning = _Search(task, contender, asked or contender.knobs(), runner_up)
    return tuning.run(microbatch_size, tolerance, budget, known, climbs)


def _shards(family: Family[K]) -> tuple[int, int]:
    knobs = family.candidate.knobs
    return getattr(knobs, "shard", 1), getattr(knobs, "replicate_zero", 0)


class _Search(Generic[K]):
    """One search, with its queue of entries; the lowest bound is first."""

    def __init__(self, task: Task, contender: Contender[K], asked: K, runner_up: bool) -> None:
        self.task, self.contender, self._asked = task, contender, asked
        self._wants_runner_up, self._limit = runner_up, task.limit_bytes
        self._climbs = contender.space.climbs
        asks_cap = self._climbs and getattr(asked, "activation_cap", None) == "auto"
        self.steps = Steps(contender=contender, limit_bytes=self._limit, asks_cap=asks_cap)
        self.offloading = Offloading(task=task, contender=contender)
        self.outcome = Outcome(task, contender)
        self.numbers = count()
        self._of_compute = compute_knobs(contender.knobs)
        self._of_root = compute_knobs(contender.knobs, saving=False)
        self._passes_of = compute_knobs(contender.knobs, beside=False)
        self._bounds: dict[_Alike, float] = {}  # of compute
        self._of_passes: dict[object, float] = {}  # the same bounds, by what passes depend on
        self._keeping_all: dict[SizedPlan, float] = {}  # bounds
        # Of families alike, the knobs of one that was in the queue, and the others.
        self._others: dict[_Alike, tuple[K, list[Family[K]]]] = {}
        # The points of a group but those of the roots.
        self._points: defaultdict[_Group, list[SearchPoint[K]]] = defaultdict(list)
        self._followed = set[_Alike]()
        # Of families alike, those with too many activations.
        self._too_many_activations: set[_Alike] = set()
        self._may_fit: set[_Alike] = set()  # of those that were asked, the others
        self._begun: dict[object, SizedPlan | int] = {}  # with its cap, or the bytes too many
        self._evaluated_plans = set[SizedPlan]()

    def run(
        self,
        microbatch_size: int | Auto,
        tolerance: float,
        budget: Budget,
        known: Iterable[Candidate[K]],
        climbs: float,
    ) -> Outcome[K]:
        """Begin with what is ``known``, take the first entry of the queue until no bound is below
        the winner, then improve it."""
        self.begin(known)
        rest = self._drain(self._roots(self._asked, microbatch_size), tolerance, budget)
        if rest:
            self.outcome.is_complete = False
            told = (e for e in rest if isinstance(e, Capped) and e.is_told)
            for entry in sorted(told, key=lambda e: e.place)[:_SETTLED]:
                if entry.bound_s < self.outcome.to_beat(runner_up=False):
                    self.evaluate(entry)
        if self._climbs:
            self._climb(microbatch_size, budget, climbs)
        self._send_less()
        return self.outcome

    def begin(self, known: Iterable[Candidate[K]]) -> None:
        """Try known candidates, with as many data-parallel ranks as the task has."""
        begin = (new for old in known for new in resized(old, self.task.num_gpus))
        self._drain_beside(((new.knobs, new.microbatch_size) for new in begin), Budget(inf))

    def _climb(self, microbatch_size: int | Auto, budget: Budget, climbs: float) -> None:
        """Try what is beside the winner until nothing there is faster by the share ``climbs``, or
        the time is over."""
        tried, improved = set[object](), self.outcome.winner
        while improved and not budget.is_over(found=True):
            best = improved
            beside = [
                (knobs, size)
                for knobs, size in neighbours(self._asked, best.candidate)
                if microbatch_size in ("auto", size) and (knobs, size) not in tried
            ]
            tried.update(beside)
            self._drain_beside(beside, budget, climbs)
            improved = self.outcome.winner if self.outcome.winner is not best else None

    def _send_less(self) -> None:
        """Take the fewest offloaded blocks with which the winner fits and takes no longer."""
        best = self.outcome.winner
        if best is None or getattr(self._asked, "offload_blocks", None) != "auto":
            return
        own = cast("Any", best.candidate.knobs)
        limit_s, too_few, enough = best.step_s * (1 + _CLIMBS), -1, own.offload_blocks
        while enough - too_few > 1:
            number = (too_few + enough) // 2
            knobs = replace(own, offload_blocks=number)
            candidate = replace(best.candidate, knobs=knobs)
            plan = self.contender.size(self.task, knobs, candidate.microbatch_size)
            price = self.contender.prices.of(plan, self.task.cluster)
            if found := self._evaluated(candidate, plan, price, limit_s)[0]:
                self.outcome.winner, enough = found, number
            else:
                too_few = number

    def _drain_beside(
        self, asked: Iterable[tuple[K, int]], budget: Budget, climbs: float = _CLIMBS
    ) -> None:
        """Try all knobs and microbatch sizes that are faster than the winner by this share."""
        roots = (self._roots(knobs, size) for knobs, size in asked)
        self._drain(chain.from_iterable(roots), climbs, budget, climbs=True)

    def _drain(
        self,
        roots: Iterable[Family[K]],
        tolerance: float,
        budget: Budget,
        *,
        climbs: bool = False,
    ) -> list[Family[K]]:
        """Open the first entry again and again; returns what is left when the time is over."""
        outcome, queue = self.outcome, sorted((root.place, root) for root in roots)
        wants = self._wants_runner_up and not climbs
        while queue or self._others:
            to_beat = outcome.to_beat(wants) * (1.0 - tolerance)
            if not queue:
                waited = map(self.follow, self._may_win(to_beat))
                queue = sorted((entry.place, entry) for entry in chain.from_iterable(waited))
                continue
            _, entry = heapq.heappop(queue)
            if entry.bound_s >= to_beat:
                outcome.rejected[SLOWER] += 1
            elif entry.alike in self._too_many_activations and type(entry) in (Family, Priced):
                outcome.rejected[OOM] += 1
            elif budget.is_over(found=outcome.winner is not None, climbs=climbs):
                rest = [entry, *(other for _, other in queue)]
                if not climbs:
                    bounds = (self._bounds[alike] for alike in self._may_win(inf))
                    outcome.bound_s = min([*bounds, *(entry.bound_s for entry in rest)])
                self._forget()
                return rest
            elif outcome.winner is None and not climbs and budget.hurries():
                entries = [entry, *(other for _, other in queue)]
                queue = sorted((first.place, first) for first in self._recomputed_first(entries))
            else:
                try:
                    for child in entry.opened(self):
                        heapq.heappush(queue, (child.place, child))
                except InfeasibleError as error:
                    outcome.rejected[error.kind] += 1
        self._forget()
        return []

    def _forget(self) -> None:
        self._others.clear()
        self._points.clear()
        self._followed.clear()
        self._keeping_all.clear()

    def _may_win(self, to_beat: float) -> list[_Alike]:
        """Of families that are alike and wait, those that may be faster than ``to_beat`` and fit.
        The others are dropped."""
        may_win = []
        for alike in [*self._others]:
            is_slower = self._bounds[alike] >= to_beat
            if is_slower or alike in self._too_many_activations:
                _, families = self._others.pop(alike)
                self.outcome.rejected[SLOWER if is_slower else OOM] += len(families)
            else:
                may_win.append(alike)
        return may_win

    def first_of(self, families: list[Family[K]]) -> list[Family[K]]:
        """Of families that are alike, the one with the most shards; the others wait, unless those
        of other points have followed already."""
        first = max(families, key=_shards)
        if first.alike in self._followed:
            return families
        _, waiting = self._others.setdefault(first.alike, (first.candidate.knobs, []))
        waiting += (family for family in families if family is not first)
        return [first]

    def follow(self, alike: _Alike) -> list[Family[K]]:
        """The families that wait and are ``alike``, with those of all other points of their
        group."""
        if alike not in self._others:
            return []
        knobs, families = self._others.pop(alike)
        self._followed.add(alike)
        (group, compute), made = alike, self.contender.space.families
        for point in self._points[group]:
            for other in made(with_compute_of(point, knobs, saving=True)):
                if self._of_compute(other) == compute:
                    families.append(self._family(other, point.asked, alike))
        return families

    def _recomputed_first(self, queue: list[Family[K]]) -> list[Family[K]]:
        """The entries with those first that recompute the most blocks in full, of these those of
        the fewest sequences per microbatch: most of what fits is there, where little does."""
        sized = []
        unrooted = (e.opened(self) if isinstance(e, Root) else (e,) for e in queue)
        for entry in chain.from_iterable(unrooted):
            if plan := entry.plan or self.sized(entry.candidate):
                blocks = sum(plan.recomputed_per_stage) * (plan.recompute == "full")
                size = (blocks, -entry.candidate.microbatch_size)
                sized.append((size, replace(entry, plan=plan)))
        most = max((size for size, _ in sized), default=None)
        return [replace(entry, turn=-(size == most)) for size, entry in sized]

    def _roots(self, asked: K, microbatch_size: int | Auto) -> Iterator[Root[K]]:
        """All families within ``asked`` that have the most shards of their group of points, or the
        most in a node; ``follow`` makes the others."""
        groups: defaultdict[_Group, list[SearchPoint[K]]] = defaultdict(list)
        rejected = self.outcome.rejected
        for point, size in points(
            self.task, self.contender.space, asked, microbatch_size, rejected=rejected
        ):
            degrees = point.degrees
            groups[size, degrees.tp, degrees.pp, degrees.context].append(point)
        node = self.task.cluster.gpus_per_node
        for group, found in groups.items():
            shards = sorted(point.degrees.shard for point in found)
            _, tp, _, context = group
            inside = [shard for shard in shards if shard * tp * context <= node]
            first = {shards[-1], *inside[-1:]}
            self._points[group] += [p for p in found if p.degrees.shard not in first]
            for point in found:
                if point.degrees.shard in first:
                    yield from self._roots_at(point, group)

    def _roots_at(self, point: SearchPoint[K], group: _Group) -> Iterator[Root[K]]:
        """All families of a point, with the bound of those that save no memory, or of all where
        what was asked for saves some."""
        made, roots = self.contender.space.families, dict[object, tuple[float, K]]()
        for knobs in [*made(saving_none(point))] or made(point):
            alike, root = (group, self._of_compute(knobs)), self._of_root(knobs)
            bound_s = self.bound_compute(Candidate(knobs, group[0]), alike) * SAVES
            if root not in roots or bound_s < roots[root][0]:
                roots[root] = bound_s, knobs
        for bound_s, knobs in roots.values():
            yield Root(
                bound_s=bound_s,
                number=next(self.numbers),
                asked=point.asked,
                candidate=Candidate(knobs, group[0]),
                alike=(group, self._of_compute(knobs)),
                plan=None,
                point=point,
            )

    def families_of(self, root: Root[K]) -> Iterator[Family[K]]:
        """The families of a root, which have its bound until they are opened."""
        (group, _), knobs = root.alike, root.candidate.knobs
        own = self._of_root(knobs)
        for other in self.contender.space.families(
            with_compute_of(root.point, knobs, saving=False)
        ):
            if self._of_root(other) == own:
                alike = group, self._of_compute(other)
                self._bounds.setdefault(alike, root.bound_s)
                yield self._family(other, root.asked, alike)

    def _family(self, knobs: K, asked: K, alike: _Alike) -> Family[K]:
        return Family(
            bound_s=self._bounds[alike],
            number=next(self.numbers),
            asked=asked,
            candidate=Candidate(knobs, alike[0][0]),
            alike=alike,
            plan=None,
        )

    def bound_compute(self, candidate: Candidate[K], alike: _Alike) -> float:
        """The bound of the compute of families that are ``alike``, as the candidate is. It is
        found once for all that have the same passes."""
        same = alike[0], self._passes_of(candidate.knobs)
        if same not in self._of_passes:
            with suppress(InfeasibleError):  # which is counted where the plan is asked for
                plan = self.contender.size(self.task, candidate.knobs, candidate.microbatch_size)
                self._of_passes[same] = least_compute_s(
                    plan, self.contender.prices.passes(plan, self.task.cluster)
                )
        self._bounds[alike] = self._of_passes.get(same, self._bounds.get(alike, 0.0))
        return self._bounds[alike]

    def bound_keeping_all(self, plan: SizedPlan) -> float:
        """The bound of a plan with these cuts that recomputes and offloads nothing, which all have
        that do; 0 of one that does not."""
        kept = plan.keeping_all
        if kept == plan:
            return 0.0
        if kept not in self._keeping_all:
            times = self.contender.prices.times(kept, self.task.cluster)
            self._keeping_all[kept] = SAVES * least_step_s(kept, times, any_unit=True)
        return self._keeping_all[kept]

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
        own, of_sums = entry.candidate.knobs, dict[bool, StepBytes]()
        is_first, fewest = True, 0  # offloaded blocks, with which the first member fits
        for knobs in self.contender.space.members(entry.asked, own, family):
            is_family = knobs is own
            candidate = entry.candidate if is_family else replace(entry.candidate, knobs=knobs)
            asked = replace(cast("Any", knobs), offload_blocks=fewest) if fewest else knobs
            plan = family if is_family else self.sized(replace(candidate, knobs=asked))
            if plan is None:
                continue
            if fewest:  # others have no fewer; whether they fit is asked where they may win
                yield candidate, plan, self.contender.prices.memory(plan, self.task.cluster)
                continue
            offloads, later = offloads_some(entry.asked, candidate), adds_later(plan)
            if offloads:
                found, plan, held = self.offloading.fewest(candidate)
            else:
                if later not in of_sums:
                    of_sums[later] = self.contender.prices.memory(plan, self.task.cluster)
                held = of_sums[later]
            if least_bytes(self.steps.with_least_cap(plan), held) <= self._limit:
                yield candidate, plan, held
                # With a cap that was asked for, larger units may hold less.
                is_least = is_first and getattr(entry.asked, "activation_cap", "auto") == "auto"
                fewest = blocks_of(found) if offloads and is_least else 0
            else:
                self.outcome.rejected[OOM] += 1
                if is_first and least_of_family(plan, held) > self._limit:
                    # Of narrower questions the first member is not that of the fewest activations.
                    if entry.asked is self._asked and entry.alike not in self._may_fit:
                        fits = least_of_alike(plan, held) <= self._limit
                        (self._may_fit if fits else self._too_many_activations).add(entry.alike)
                    return
            is_first = False

    def offloading_least(self, entry: Family[K], family: SizedPlan) -> SizedPlan:
        """The family's plan, with the fewest offloaded blocks that any member may have."""
        if not offloads_some(entry.asked, entry.candidate):
            return family
        members = self.contender.space.members(entry.asked, entry.candidate.knobs, family)
        first, *_ = self.offloading.fewest(replace(entry.candidate, knobs=next(iter(members))))
        blocks = cast("Any", first.knobs).offload_blocks
        return self.offloading.sized(entry.candidate, blocks)[1]

    def offloading_more(self, entry: Capped[K], over: int = 0) -> Iterator[Capped[K]]:
        """A member that does not fit, by ``over`` bytes if that is known, with more offloaded
        blocks, if their number is open."""
        if not offloads_some(entry.asked, entry.candidate):
            return
        if more := self.offloading.more(entry.candidate, entry.plan, entry.price, over):
            candidate, plan, held = more
            times = self.contender.prices.times(plan, self.task.cluster)
            price = PlanPrice(**vars(times), **vars(held))
            new = {"candidate": candidate, "plan": plan, "price": price}
            bound_s = least_step_s(plan, price)
            yield replace(entry, **new, bound_s=bound_s, is_begun=False, is_told=False)

    def begun(self, entry: Capped[K]) -> Iterable[Capped[K]]:
        """The entry with the largest activation cap with which the beginning of a step fits, which
        is that of all that are alike and hold as much; if none fits, with more offloaded blocks."""
        plan, memory = entry.plan, entry.price.memory
        same = (entry.alike, plan.schedule.unit, plan.reduce_every, plan.activation_cap, memory)
        if same not in self._begun:
            self._begun[same] = self.steps.begun(plan, entry.price)
        found = self._begun[same]
        if isinstance(found, int):
            yield from self.with_cap(entry, None)
            yield from self.offloading_more(entry, found)
        else:
            capped = replace(plan, activation_cap=found.activation_cap)
            yield from self.with_cap(replace(entry, is_begun=True), capped)

    def told(self, entry: Capped[K]) -> Iterable[Capped[K]]:
        """The entry with a cap that fits and, of a long step, the time that shorter ones tell."""
        plan, told_s = self.steps.told(entry.plan, entry.price)
        bound_s = max(entry.bound_s, told_s)
        yield from self.with_cap(replace(entry, bound_s=bound_s, is_told=True), plan)

    def with_cap(self, entry: Capped[K], plan: SizedPlan | None) -> Iterator[Capped[K]]:
        """The entry with the cap of its ``plan``; none without a plan."""
        if plan is None:
            self.outcome.rejected[OOM] += 1
        elif plan.activation_cap == entry.plan.activation_cap:
            yield entry
        else:
            knobs = replace(entry.candidate.knobs, activation_cap=plan.activation_cap)
            candidate = replace(entry.candidate, knobs=knobs)
            bound_s = max(entry.bound_s, least_step_s(plan, entry.price))
            yield replace(entry, candidate=candidate, plan=plan, bound_s=bound_s)

    def evaluate(self, entry: Capped[K]) -> Iterable[Family[K]]:
        """Simulate a member; its fastest order that fits on all ranks counts. What replaces it."""
        outcome = self.outcome
        if entry.plan in self._evaluated_plans:
            return ()
        self._evaluated_plans.add(entry.plan)
        slowest_s = outcome.slowest(self._wants_runner_up)
        found, over = self._evaluated(entry.candidate, entry.plan, entry.price, slowest_s)
        outcome.simulated += 1
        before = outcome.winner
        if found:
            outcome.offer(found)
        elif slowest_s == inf:
            outcome.rejected[OOM] += 1
        more = self.offloading_more(entry, over) if over else ()
        return self.follow(entry.alike) if outcome.winner is not before else more

    def _evaluated(
        self, candidate: Candidate[K], plan: SizedPlan, price: PlanPrice, slowest_s: float
    ) -> tuple[Evaluated[K] | None, int]:
        """A candidate with the cap with which it fits, None if it takes ``slowest_s`` or more; and
        by how many bytes an order that takes less does not fit."""
        best, over = self.steps.fastest(plan, price, slowest_s)
        if best is None:
            return None, over
        knobs = candidate.knobs
        if best.plan.activation_cap != plan.activation_cap:
            knobs = replace(knobs, activation_cap=best.plan.activation_cap)
        return Evaluated(replace(candidate, knobs=knobs), best), over
