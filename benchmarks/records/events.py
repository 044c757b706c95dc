"""The append-only file that each rank writes while it works: one JSON object per line.

Every line is flushed when it is written, so that what was measured survives any kill. Events are
``environment``, ``gate``, ``warmup``, ``step``, ``memory``, ``counters``, ``spans``, ``losses``,
``done``, and, at an early end, ``error``, ``oom`` or ``signal``.

A reader leaves out lines that a kill, a full disk or a broken file system has damaged, and uses
every complete line before and after them. ``measured`` is the one place where fields of a record
are derived from events.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from pydantic import ValidationError

from benchmarks.records.record import GateResult, RankRecord
from benchmarks.specification.reading import adapter
from zeropp.types.layout import Layout

Events = list[dict[str, Any]]  # of one rank, in their order

# The field that a complete line of each kind has, and the types that its value may have.
_NUMBER = (int, float)
_REQUIRED: dict[str, dict[str, tuple[type, ...]]] = {
    "step": {"index": (int,), "seconds": _NUMBER},
    "warmup": {"index": (int,), "seconds": _NUMBER},
    "error": {"type": (str,), "message": (str,)},
    "oom": {"type": (str,), "message": (str,)},
    "signal": {"name": (str,)},
    "spans": {"rows": (list,)},
}
# A step that takes longer than both, in seconds and in medians of all steps, holds a pause.
_PAUSE_S, _PAUSE_MEDIANS = 5.0, 10.0
_RANK_FILE = re.compile(r"rank_(\d+)\.jsonl")


class EventWriter:
    """Writes the events of one rank."""

    def __init__(self, directory: Path, rank: int) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._file = rank_file(directory, rank).open("ab", buffering=0)
        self._torn = False

    def write(self, kind: str, **fields: Any) -> dict[str, Any]:
        """Append one event with the time of day and return it; raises OSError where the disk is
        full."""
        event = {"event": kind, "time": time.time(), **fields}
        line = json.dumps(event).encode() + b"\n"
        whole = b"\n" + line if self._torn else line  # after an incomplete line, start a new one
        self._torn = True
        try:
            written = self._file.write(whole)
        except OSError as error:  # of a full disk or a quota, which names no file
            raise OSError(error.errno, error.strerror, self._file.name) from None
        if written != len(whole):
            raise OSError(f"{self._file.name}: only {written} of {len(whole)} bytes were written")
        self._torn = False
        return event


def rank_file(directory: Path, rank: int) -> Path:
    """The file into which a rank writes its events."""
    return directory / f"rank_{rank:03d}.jsonl"


def rank_of(path: Path) -> int | None:
    """The rank whose events a file holds; None if it is not named like an event file."""
    named = _RANK_FILE.fullmatch(path.name)
    return int(named[1]) if named else None


def read_events(path: Path) -> Events:
    """All complete events of a file, in order; none if the file is missing or unreadable."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        return []
    events = (_event(line) for line in lines)
    return [event for event in events if event is not None]


def _event(line: bytes) -> dict[str, Any] | None:
    """One event, or None where the line is damaged."""
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(event, dict) or not isinstance(event.get("event"), str):
        return None
    required = {"time": _NUMBER} | _REQUIRED.get(event["event"], {})
    whole = all(isinstance(event.get(name), types) for name, types in required.items())
    return event if whole else None


def of_kind(events: Events, *kinds: str) -> Events:
    """The events of these kinds, in their order."""
    return [event for event in events if event["event"] in kinds]


def measured(
    ranks: Mapping[int, Events], plan: Mapping[str, Any] | None = None, launched_digest: str = ""
) -> dict[str, Any]:
    """The fields of a record that come from the events of the ranks, by rank. ``plan`` is that of
    the record, ``launched_digest`` that of the launcher's code."""
    first = ranks.get(0, [])
    steps = of_kind(first, "warmup", "step")
    spans = [event for events in ranks.values() for event in of_kind(events, "spans")]
    error, compared = (_last(first, "losses").get(name) for name in ("error", "steps"))
    step_s, code = _slowest(ranks, "step"), _code_fields(ranks, launched_digest)
    return {
        "gate": _gate(first),
        "loss_error": float(error) if isinstance(error, _NUMBER) else None,
        "loss_steps": compared if isinstance(compared, int) else 0,
        "losses": [event["loss"] for event in steps if "loss" in event],
        "grad_norms": [event["grad_norm"] for event in steps if "grad_norm" in event],
        "warmup_s": _slowest(ranks, "warmup"),
        "step_s": step_s,
        "ranks": [_rank_record(rank, events, plan or {}) for rank, events in ranks.items()],
        "spans": [row for event in spans for row in event["rows"]],
        "span_clock": str(spans[0].get("clock", "")) if spans else "",
        **code,
        "notes": [*code.get("notes", ()), *_pauses(step_s)],
    }


def _pauses(step_s: list[float]) -> list[str]:
    """A note on each timed step that took so long that the ranks must have stood still meanwhile;
    medians do not show it."""
    usual_s = median(step_s) if step_s else 0.0
    return [
        f"timed step {number} of {len(step_s)} took {seconds:.1f} s, the median {usual_s:.2g} s: "
        "the ranks stood still (suspended, a slow disk, a busy node)"
        for number, seconds in enumerate(step_s, start=1)
        if seconds > max(_PAUSE_S, _PAUSE_MEDIANS * usual_s)
    ]


def _code_fields(ranks: Mapping[int, Events], launched_digest: str) -> dict[str, Any]:
    """Commit, dirty flag and digest of rank 0's code, and notes if the launcher or other ranks did
    not run the same files. Nothing if rank 0 has not said what it runs."""
    codes = {rank: _last(events, "environment").get("code") for rank, events in ranks.items()}
    digests = {r: code.get("digest", "") for r, code in codes.items() if isinstance(code, dict)}
    first, code = digests.get(0, ""), codes.get(0)
    if not first or not isinstance(code, dict):
        return {}
    notes = []
    if launched_digest and first != launched_digest:
        notes.append("the suite's files changed between submission and start; the ranks' count")
    if others := [str(r) for r, digest in sorted(digests.items()) if digest not in ("", first)]:
        notes.append(f"other files of the suite than on rank 0 ran on ranks {', '.join(others)}")
    sha, dirty = str(code.get("sha", "unknown")), bool(code.get("dirty", True))
    return {"git_sha": sha, "git_dirty": dirty, "code_digest": str(first), "notes": notes}


def _gate(events: Events) -> GateResult | None:
    """The result of the gate; None if there is none, or if its line is damaged."""
    event = _last(events, "gate")
    try:
        return adapter(GateResult).validate_python(event) if event else None
    except ValidationError:
        return None


def _slowest(ranks: Mapping[int, Events], kind: str) -> list[float]:
    """The time of each step on its slowest rank, for steps that all ranks finished."""
    columns = [{e["index"]: e["seconds"] for e in of_kind(r, kind)} for r in ranks.values()]
    whole = set(columns[0]).intersection(*columns[1:]) if columns else set()
    return [max(column[index] for column in columns) for index in sorted(whole)]


def _last(events: Events, kind: str) -> dict[str, Any]:
    """The fields of the last event of a kind, without its kind and time."""
    matches = of_kind(events, kind)
    return {k: v for k, v in matches[-1].items() if k not in ("event", "time")} if matches else {}


def _rank_record(rank: int, events: Events, plan: Mapping[str, Any]) -> RankRecord:
    seen = {
        "rank": rank,
        "pp_rank": Layout(**plan["layout"]).coordinates(rank)["pp"] if plan else 0,
        "environment": _last(events, "environment"),
        "step_s": [event["seconds"] for event in of_kind(events, "step")],
        "counters": _last(events, "counters"),
    }
    try:
        return adapter(RankRecord).validate_python(seen | _last(events, "memory"))
    except ValidationError:  # a damaged event of memory or counters
        return adapter(RankRecord).validate_python(seen | {"counters": {}})
