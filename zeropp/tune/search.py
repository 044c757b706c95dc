"""The best feasible configuration of a contender: exhaustive, best bound first.

Families of configurations (all but unit, cap and point of reduction) wait in a queue by a lower
bound of their step. The lowest is taken: first priced, then opened into its members, then
simulated; the search ends when no bound in the queue is below the runner-up. What lacks memory
falls before it has a schedule where its least bytes are too many, else by its programs' peak.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum

from zeropp.cost import price_plan
from zeropp.plan import Plan
from zeropp.sim.memory import peak_memory
from zeropp.sim.simulate import SimResult, simulate
from zeropp.tune.bound import least_bytes, least_step_s, work_s
from zeropp.tune.plans import sized_plan, with_programs
from zeropp.tune.space import Candidate, Space, Task, families, members

RESERVED_GIB = 4.0  # of a device: context, libraries and communicators, fragmentation


OOM = "out of memory"
SLOWER = "slower by its lower bound"


@dataclass(frozen=True)
class Evaluated:
    """A configuration that was simulated."""

    candidate: Candidate
    step_s: float
    peak_bytes: int

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

    def offer(self, new: Evaluated) -> None:
        """Keep the best, and the best of other degrees."""
        if self.winner is None or new.step_s < self.winner.step_s:
            if self.winner is not None and self.winner.degrees != new.degrees:
                self.runner_up = self.winner
            self.winner = new
        elif new.degrees != self.winner.degrees and new.step_s < self.to_beat:
            self.runner_up = new

    @property
    def to_beat(self) -> float:
        """Step time above which a configuration changes nothing."""
        return self.runner_up.step_s if self.runner_up else float("inf")


def memory_limit_bytes(task: Task) -> int:
    """Bytes that a plan may use on one device."""
    return int((task.cluster.device.memory_gib - RESERVED_GIB) * 2**30)


def search(
    task: Task, space: Space, progress: Progress | None = None, tolerance: float = 0.005
) -> Outcome:
    """Find the winner and the runner-up; both are None where nothing fits.

    ``tolerance``: a configuration whose bound promises less than this share of the step is not
    simulated, so none can be faster than the winner by more.
    """
    outcome = Outcome(task, space)
    queue = [
        (work_s(task, family), number, family, _Known.SIZES)
        for number, family in enumerate(families(task, space, outcome.fallen))
    ]
    heapq.heapify(queue)
    number = len(queue)
    while queue:
        bound, _, candidate, known = heapq.heappop(queue)
        if progress:
            progress(number - len(queue), number, outcome.winner)
        if bound >= outcome.to_beat * (1.0 - tolerance):
            outcome.fallen[SLOWER] += 1 + len(queue)
            break
        if known is _Known.PRICED_MEMBER:
            _evaluate(task, candidate, outcome)
            continue
        children = [candidate] if known is _Known.SIZES else members(space, candidate)
        for child in children:
            priced = _price(task, child, outcome)
            if priced is not None:
                number += 1
                heapq.heappush(queue, (priced, number, child, _Known(known + 1)))
    return outcome


class _Known(IntEnum):
    """How much is known of a queue's entry, and so what its bound is made of."""

    SIZES = 0  # a family: its work alone
    PRICED_FAMILY = 1
    PRICED_MEMBER = 2


def _price(task: Task, candidate: Candidate, outcome: Outcome) -> float | None:
    """Lower bound of a family or a member; None where it lacks memory."""
    plan = sized_plan(task, candidate)
    price = price_plan(plan, task.cluster)
    if least_bytes(plan, price, candidate) > memory_limit_bytes(task):
        outcome.fallen[OOM] += 1
        return None
    return least_step_s(plan, price)


def _evaluate(task: Task, candidate: Candidate, outcome: Outcome) -> None:
    sizes = sized_plan(task, candidate)
    price = price_plan(sizes, task.cluster)
    plan = with_programs(sizes, candidate)
    peak = max(memory.total for memory in peak_memory(plan, price))
    if peak > memory_limit_bytes(task):
        outcome.fallen[OOM] += 1
        return
    outcome.simulated += 1
    result = simulate(plan, task.cluster, price=price)
    outcome.offer(Evaluated(candidate, result.step_s, peak))


def result_of(task: Task, candidate: Candidate) -> SimResult:
    """A configuration simulated in full."""
    return simulate(plan_of(task, candidate), task.cluster)


def plan_of(task: Task, candidate: Candidate) -> Plan:
    """The whole plan of a configuration."""
    return with_programs(sized_plan(task, candidate), candidate)
