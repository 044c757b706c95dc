"""The best feasible configuration of a contender: exhaustive, best bound first.

Families of configurations (all but unit, cap and point of reduction) wait in a queue by a lower
bound of their step. The lowest is taken: first priced, then opened into its members, then
simulated; the search ends when no bound in the queue is below the winner. So the winner is the
best there is; the runner-up is the best of other degrees among those that were simulated. What
lacks memory falls before it has a schedule where its least bytes are too many or a lower activation
cap has been too much, else by the peak of its programs.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from zeropp.cost import PlanPrice, price_plan
from zeropp.plan import Plan
from zeropp.planner.zeropp_plan import fastest
from zeropp.sim.memory_curve import rank_peak
from zeropp.sim.simulator import SimResult, simulate
from zeropp.tune.bound import least_bytes, least_step_s, work_s
from zeropp.tune.sized_plans import sized_plan, with_programs
from zeropp.tune.space import Candidate, Space, Task, families, members

_LARGEST_GAIN = 1.2  # of planning with durations: 10 % at most in schedule_orders.json

OOM = "out of memory"
SLOWER = "slower by its lower bound"


@dataclass(frozen=True)
class Evaluated:
    """A configuration that was simulated, in the order that its contender's planner chooses."""

    candidate: Candidate
    result: SimResult

    @property
    def step_s(self) -> float:
        """Seconds of one step."""
        return self.result.step_s

    @property
    def peak_bytes(self) -> int:
        """Peak of the fullest rank."""
        return self.result.peak_bytes

    @property
    def degrees(self) -> tuple[object, ...]:
        """What makes two configurations different enough to be winner and runner-up."""
        layout = self.candidate.layout
        degrees = (layout.pp, layout.tp, layout.shard, layout.replicate)
        return (*degrees, layout.chunks, self.candidate.schedule, self.candidate.recompute)


Progress = Callable[[int, int, Evaluated | None], None]  # settled, known so far, best so far


@dataclass
class Outcome:
    """What a search found. ``fallen`` counts families and members by why they fell."""

    task: Task
    space: Space
    winner: Evaluated | None = None
    runner_up: Evaluated | None = None
    fallen: Counter[str] = field(default_factory=Counter)
    simulated: int = 0
    too_large: set[Candidate] = field(default_factory=set)  # whatever their cap beyond the tried

    def offer(self, new: Evaluated) -> None:
        """Keep the best, and the best of other degrees."""
        if self.winner is None or new.step_s < self.winner.step_s:
            if self.winner is not None and self.winner.degrees != new.degrees:
                self.runner_up = self.winner
            self.winner = new
        elif new.degrees != self.winner.degrees and (
            self.runner_up is None or new.step_s < self.runner_up.step_s
        ):
            self.runner_up = new

    @property
    def to_beat(self) -> float:
        """Step time above which a configuration changes nothing: the winner's, once there is
        another to put beside it."""
        return self.winner.step_s if self.winner and self.runner_up else float("inf")


def search(
    task: Task, space: Space, progress: Progress | None = None, tolerance: float = 0.005
) -> Outcome:
    """Find the winner and the runner-up; both are None where nothing fits.

    ``tolerance``: a configuration whose bound promises less than this share of the step is not
    simulated, so none can be faster than the winner by more.
    """
    outcome = Outcome(task, space)
    queue = [
        _Entry(work_s(task, family), number, family)
        for number, family in enumerate(families(task, space, outcome.fallen))
    ]
    heapq.heapify(queue)
    number = len(queue)
    while queue:
        entry = heapq.heappop(queue)
        if progress:
            progress(number - len(queue), number, outcome.winner)
        if entry.bound_s >= outcome.to_beat * (1.0 - tolerance):
            outcome.fallen[SLOWER] += 1 + len(queue)
            break
        if entry.is_member:
            _evaluate(task, entry, outcome)
            continue
        for child in _children(task, space, entry, number, outcome):
            number += 1
            heapq.heappush(queue, child)
    return outcome


@dataclass(frozen=True, order=True, slots=True)
class _Entry:
    """A family by its work alone, then with its price; last a member, which has its family's
    price, because no price reads unit, cap or point of reduction."""

    bound_s: float
    number: int  # unique, so that nothing after it is compared
    candidate: Candidate
    price: PlanPrice | None = None
    is_member: bool = False


def _children(
    task: Task, space: Space, entry: _Entry, number: int, outcome: Outcome
) -> Iterator[_Entry]:
    """What an entry is replaced by: itself with its price, or its members."""
    price = entry.price
    opened = [entry.candidate] if price is None else members(space, entry.candidate)
    for candidate in opened:
        plan = sized_plan(task, candidate)
        known = price or price_plan(plan, task.cluster)
        if least_bytes(plan, known, candidate) > task.cluster.device.usable_bytes:
            outcome.fallen[OOM] += 1
            continue
        number += 1
        bound = least_step_s(plan, known)
        yield _Entry(bound, number, candidate, known, is_member=price is not None)


def _evaluate(task: Task, entry: _Entry, outcome: Outcome) -> None:
    price = entry.price
    assert price is not None
    uncapped = replace(entry.candidate, cap=0)
    if uncapped in outcome.too_large:  # members come with the smallest cap first
        outcome.fallen[OOM] += 1
        return
    plan = sized_plan(task, entry.candidate)
    limit = task.cluster.device.usable_bytes
    (simple,) = with_programs(plan, entry.candidate)
    if not _fits(simple, price, limit):
        outcome.fallen[OOM] += 1
        outcome.too_large.add(uncapped)
        return
    outcome.simulated += 1
    result = simulate(simple, task.cluster, price=price)
    if result.step_s >= outcome.to_beat * _LARGEST_GAIN:
        return
    others = with_programs(plan, entry.candidate, price)[1:]
    if others:
        result = min(result, fastest(others, task.cluster, price), key=lambda r: r.step_s)
    if result.peak_bytes > limit:
        outcome.fallen[OOM] += 1
        return
    outcome.offer(Evaluated(entry.candidate, result))


def _fits(plan: Plan, price: PlanPrice, limit: int) -> bool:
    ranks = range(plan.schedule.num_ranks)
    return all(rank_peak(plan, price, rank).total <= limit for rank in ranks)


def result_of(task: Task, candidate: Candidate) -> SimResult:
    """A configuration simulated in full, in the order that its contender's planner chooses."""
    plan = sized_plan(task, candidate)
    price = price_plan(plan, task.cluster)
    return fastest(with_programs(plan, candidate, price), task.cluster, price)
