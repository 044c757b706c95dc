"""The append-only file that each rank writes while it works: one JSON object a line.

A line is flushed as it is written, so whatever was measured survives any kill. Events are
``environment``, ``gate``, ``warmup``, ``step``, ``memory``, ``counters``, ``spans``, ``done``,
and the ends ``error``, ``oom`` and ``signal``; of a rank without its peers ``lone_warmup``,
``lone_step``, ``compute`` and ``kernels``.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any


class EventWriter:
    """Writes the events of one rank."""

    def __init__(self, directory: Path, rank: int) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._file = rank_file(directory, rank).open("a", buffering=1)

    def write(self, kind: str, **fields: Any) -> None:
        """Append one event with the time of day."""
        self._file.write(json.dumps({"event": kind, "time": time.time(), **fields}) + "\n")
        self._file.flush()


def rank_file(directory: Path, rank: int) -> Path:
    """Where rank ``rank`` writes its events."""
    return directory / f"rank_{rank:03d}.jsonl"


def read_events(path: Path) -> list[dict[str, Any]]:
    """All whole lines of an event file; a last line cut off by a kill is dropped."""
    events = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            events.append(json.loads(line))
        except ValueError:
            break
    return events
