"""The best feasible configuration of a contender: exhaustive, best bound first.

Families of configurations (all but unit, cap and point of reduction) wait in a queue by their
lower bound; the lowest is opened into its members, members are simulated, and the search ends
when no bound in the queue is below the runner-up. What lacks memory falls first, without a
schedule where its least bytes are too many already, else by the peak of its programs.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from zeropp.cost import price_plan
from zeropp.plan import Plan
from zeropp.sim.memory import peak_memory
from zeropp.sim.simulate import SimResult, simulate
from zeropp.tune.bound import least_bytes, least_step_s
from zeropp.tune.plans import sized_plan, with_programs
from zeropp.tune.space import Candidate, Space, Task, families, members

RESERVED_GIB = 4.0  # of a device: context, libraries and communicators, fragmentation

Progress = Callable[[int, int, float], None]  # opened or fallen, known, best step so far

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
    queue: list[tuple[float, int, Candidate, bool]] = []
    known = 0

    def push(candidate: Candidate, is_family: bool) -> None:
        nonlocal known
        known += 1
        plan = sized_plan(task, candidate)
        price = price_plan(plan, task.cluster)
        if least_bytes(plan, price, candidate) > memory_limit_bytes(task):
            outcome.fallen[OOM] += 1
        else:
            bound = least_step_s(plan, price)
            heapq.heappush(queue, (bound, known, candidate, is_family))

    for family in families(task, space, outcome.fallen):
        push(family, True)
    while queue:
        bound, _, candidate, is_family = heapq.heappop(queue)
        if progress:
            best = outcome.winner.step_s if outcome.winner else float("inf")
            progress(known - len(queue), known, best)
        if bound >= outcome.to_beat * (1.0 - tolerance):
            outcome.fallen[SLOWER] += 1 + len(queue)
            break
        if is_family:
            for member in members(space, candidate):
                push(member, False)
        else:
            _evaluate(task, candidate, outcome)
    return outcome


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
