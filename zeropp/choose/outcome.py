"""What a search has found: its winner and runner-up, and how good they are."""

from __future__ import annotations

from collections import Counter
from dataclasses import KW_ONLY, dataclass, field
from typing import Generic

from zeropp.choose.contender import Contender
from zeropp.choose.task import Candidate, K, Task
from zeropp.price.simulator import SimResult
from zeropp.schedule.plan import Plan


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
    bound_s: float = float("inf")  # the least that a plan takes which the budget left untried

    @property
    def gap(self) -> float:
        """The share by which a plan may be faster than the winner: 0 of a complete search, 1 where
        one that was cut has found nothing."""
        if self.winner is None:
            return float(not self.is_complete)
        return max(0.0, 1.0 - self.bound_s / self.winner.step_s)

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
