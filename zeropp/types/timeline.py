"""What a step did when: one type for the simulator's result and for a measured run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

Lane = Literal["compute", "gather", "reduce", "replicas", "transfer", "memory", "offload"]
Provenance = Literal["measured", "traced", "replayed", "simulated", "published"]


class Span(NamedTuple):
    """One action on one lane of one pipeline rank, in seconds since the start of the step.

    ``action`` is the text form of a schedule's action (``3F1`` is the forward of microbatch 1 in
    stage 3) or a plain word. It is a tuple, because a large step has hundreds of
    thousands of spans.
    """

    rank: int
    lane: Lane
    action: str
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """The spans of one step; ``provenance`` says whether they were measured or simulated."""

    title: str
    provenance: Provenance
    spans: tuple[Span, ...]

    @property
    def step_s(self) -> float:
        """End of the last span."""
        return max((span.end_s for span in self.spans), default=0.0)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks with at least one span, ascending."""
        return tuple(sorted({span.rank for span in self.spans}))

    def to_rows(self) -> list[list[Any]]:
        """Compact JSON rows for a record: [rank, lane, action, start_s, end_s]."""
        return [[s.rank, s.lane, s.action, s.start_s, s.end_s] for s in self.spans]

    def chrome_events(self) -> Iterator[dict[str, Any]]:
        """Complete events of the Chrome trace format (Perfetto reads it); times in microseconds.

        Each rank is shown as a process and each lane as one of its threads. Perfetto requires
        thread numbers to be unique in the whole trace and reserves 0 for the idle thread.
        """
        lanes: tuple[Lane, ...] = get_args(Lane)
        process = {rank: 1 + rank * len(lanes) for rank in self.ranks}
        for rank, pid in process.items():
            name = {"name": f"pipeline rank {rank}"}
            yield {"ph": "M", "pid": pid, "name": "process_name", "args": name}
            for number, lane in enumerate(lanes):
                yield {
                    "ph": "M",
                    "pid": pid,
                    "tid": pid + number,
                    "name": "thread_name",
                    "args": {"name": lane},
                }
        for span in self.spans:
            yield {
                "ph": "X",
                "pid": process[span.rank],
                "tid": process[span.rank] + lanes.index(span.lane),
                "name": span.action,
                "cat": span.lane,
                "ts": span.start_s * 1e6,
                "dur": (span.end_s - span.start_s) * 1e6,
            }

    def write_chrome(self, path: Path) -> None:
        """Write a JSON file that ui.perfetto.dev and chrome://tracing can open."""
        document = {
            "traceEvents": list(self.chrome_events()),
            "otherData": {"title": self.title, "provenance": self.provenance},
        }
        path.write_text(json.dumps(document), encoding="utf-8")


def timeline_from_rows(title: str, provenance: Provenance, rows: list[list[Any]]) -> Timeline:
    """The timeline of such rows: the inverse of ``Timeline.to_rows``."""
    return Timeline(title, provenance, tuple(Span(*row) for row in rows))
