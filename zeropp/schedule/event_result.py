"""The result of the event loop: when every action starts and ends, and the sums over actions."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import chain

from zeropp.schedule.action import Action, Op, collector_paused
from zeropp.schedule.program import Program
from zeropp.timeline import Lane, Span

LANES: dict[Op, Lane] = {
    Op.FORWARD: "compute",
    Op.BACKWARD_INPUT: "compute",
    Op.BACKWARD_WEIGHT: "compute",
    Op.FULL_BACKWARD: "compute",
    Op.UNSHARD: "gather",
    Op.RESHARD: "gather",
    Op.REDUCE_GRAD: "reduce",
    Op.SEND_F: "transfer",
    Op.SEND_B: "transfer",
    Op.RECV_F: "transfer",
    Op.RECV_B: "transfer",
}

_NAMES = {op: op.value for op in Op}


@dataclass(frozen=True, kw_only=True)
class EventResult:
    """Outcome of one run. All times are in the unit of the costs.

    ``starts[i]`` and ``ends[i]`` belong to action ``i`` of ``sequence``, which has the actions of
    all ranks; receives and releases take no time. ``busy[r]`` is the sum of rank r's compute.
    ``exposed_gather[r]`` is the time during which its compute waited for parameters,
    ``exposed_wait[r]`` for messages.
    """

    programs: tuple[Program, ...]
    stage_rank: tuple[int, ...]
    sequence: tuple[Action, ...]
    starts: list[float]
    ends: list[float]
    busy: tuple[float, ...]
    exposed_gather: tuple[float, ...]
    exposed_wait: tuple[float, ...]
    step_s: float

    @cached_property
    def start(self) -> tuple[list[float], ...]:
        """When action ``i`` of the program of rank ``r`` starts: ``start[r][i]``."""
        return self._by_rank(self.starts)

    @cached_property
    def end(self) -> tuple[list[float], ...]:
        """When action ``i`` of the program of rank ``r`` ends: ``end[r][i]``."""
        return self._by_rank(self.ends)

    def _by_rank(self, times: list[float]) -> tuple[list[float], ...]:
        ranks: tuple[list[float], ...] = tuple([] for _ in self.programs)
        for (stage, _, _), time in zip(self.sequence, times, strict=True):
            ranks[self.stage_rank[stage]].append(time)
        return ranks

    @property
    def bubble(self) -> float:
        """The share of the step in which the rank with the most compute does not compute."""
        return 1.0 - max(self.busy) / self.step_s

    @property
    def over_ideal(self) -> float:
        """The step time divided by the compute of the rank with the most; 1 means no bubble."""
        return self.step_s / max(self.busy)

    @collector_paused()
    def spans(self) -> tuple[Span, ...]:
        """Spans for a Timeline, rank by rank. Receives and releases take no time and are left
        out."""
        ranks: list[list[Span]] = [[] for _ in self.programs]
        add = [spans.append for spans in ranks]
        where, texts = self.stage_rank, [f"{stage}" for stage in range(len(self.stage_rank))]
        for (stage, op, j), start, end in zip(self.sequence, self.starts, self.ends, strict=True):
            if end > start:
                rank, lane = where[stage], LANES[op]
                action = texts[stage] + _NAMES[op] + ("" if j is None else f"{j}")
                add[rank](Span(rank, lane, action, start, end))
        return tuple(chain.from_iterable(ranks))
