"""The state of every point of every sweep, from its folder and from Slurm's queue.

Attempts that are over and have no record get one first, with the reason that Slurm gives.
"""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, get_args

from rich.console import Console
from rich.text import Text

from benchmarks.launch.attempt import (
    DamagedError,
    age_s,
    close_abandoned,
    is_alive,
    is_open,
    read_object,
)
from benchmarks.launch.slurm.client import QueuedJob, SlurmError
from benchmarks.launch.slurm.submissions import (
    SubmittedPoint,
    View,
    close_ended,
    query_slurm,
    read_view,
)
from benchmarks.records.events import of_kind, rank_file, read_events
from benchmarks.records.record import RunRecord, Status
from benchmarks.records.recorded_spec import check_key, differences, flat_spec, read_records

UNDER_WAY = ("running", "suspended", "waiting", "unseen")
ENDED_WELL = ("ok", "infeasible")
STATES = (*get_args(Status), *UNDER_WAY, "missing", "corrupt")
_POINT = re.compile(r".+-\d+gpu-[0-9a-f]{10}")  # the name of a point's folder, see RunSpec.spec_id
_COLOURS = {"ok": "green", "running": "cyan", "waiting": "blue", "infeasible": "yellow"}
_NOT_ENDED = ("running", "suspended", "waiting", "missing")  # their detail is a few words
_INDENT = "    "  # of what is said of the point above
_FILE_WIDTH = 10_000  # letters per line where the output is no terminal, so that none is folded


@dataclass(frozen=True, kw_only=True)
class PointStatus:
    """One point's line in the table."""

    spec_id: str
    state: str  # missing, waiting, running, suspended, the status of its record, or corrupt
    evidence: str = ""  # measured, traced or simulated; empty without a record
    ended: str = ""  # how long ago the shown attempt ended
    detail: str = ""  # while it runs, step, its age and time left; otherwise the reason
    job: str = ""
    nodes: str = ""
    log: str = ""
    differs: dict[str, str] = field(default_factory=dict)  # from the other points, by key


@dataclass(frozen=True)
class SweepStatus:
    """The states of all points, and what could not be found out."""

    points: list[PointStatus]
    notes: list[str]  # one line per file that is damaged or could not be written
    problem: str = ""  # why Slurm could not be asked; empty if it answered


def sweep_status(runs_dir: Path, chosen: Mapping[str, Sequence[str]] | None = None) -> SweepStatus:
    """The state of every point, in the order of their names; with ``chosen`` only of those that
    have one of the values of each of its keys. Raises SpecError for a key that no point has."""
    notes, problem = close_abandoned(runs_dir), ""
    try:
        view = query_slurm(runs_dir)
        close_ended(view)
    except SlurmError as error:
        view, problem = read_view(runs_dir), str(error)
    notes += view.problems
    under_way = {} if problem else view.under_way()
    folders = {path.name for path in runs_dir.iterdir() if path.is_dir()}
    names = {name for name in folders if _POINT.fullmatch(name)} | set(view.latest)
    records = {name: _newest(runs_dir / name, notes) for name in sorted(names)}
    specs = {name: _flat_spec(runs_dir / name, view, record) for name, record in records.items()}
    for key, values in (chosen or {}).items():
        check_key(key, specs.values())
        asked = {_canonical(value) for value in values}
        records = {n: r for n, r in records.items() if _canonical(specs[n].get(key, "")) in asked}
    known = [record for record in records.values() if record is not None]
    points = [
        _status(runs_dir / name, view, under_way.get(name, ""), record, notes)
        for name, record in records.items()
        if record is None or name in under_way or not _is_answered(record, known)
    ]
    differs = differences([specs[point.spec_id] for point in points])
    points = [replace(p, differs=words) for p, words in zip(points, differs, strict=True)]
    return SweepStatus(points, list(dict.fromkeys(notes)), problem)


def _canonical(value: str) -> str:
    """A value as any of the words for it gives it: True, true; 1e-3, 0.001."""
    try:
        return repr(float(value))
    except ValueError:
        return value.lower()


def _flat_spec(point: Path, view: View, record: RunRecord | None) -> dict[str, str]:
    """The spec of a point, flat: of its record, or as it was frozen; empty if it is not known."""
    if record is not None:
        return flat_spec(record.spec)
    places = [*point.glob("*/spec.json")]
    if point.name in view.latest:
        places += [view.latest[point.name].directory / "specs" / point.name / "spec.json"]
    for path in places:
        with suppress(DamagedError):
            return flat_spec(read_object(path))
    return {}


def _status(
    point: Path, view: View, under_way: str, record: RunRecord | None, notes: list[str]
) -> PointStatus:
    status = partial(PointStatus, spec_id=point.name)
    submitted = view.latest.get(point.name)
    job = view.queued.get(submitted.job) if submitted else None
    if submitted and job and under_way:
        return _queued(submitted, job)
    # A folder whose name begins with a dot is not an attempt yet.
    attempts = sorted(path for path in point.glob("[!.]*-*") if is_open(path))
    if alive := [p for p in attempts if not (p / "record.json").exists() and is_alive(p)]:
        log = str(alive[-1] / "rank_000.log")
        return status(state="running", detail=_progress(alive[-1]), log=log)
    if under_way:
        return status(state="unseen", detail=under_way, job=submitted.job if submitted else "")
    if record is not None:
        return _recorded(record, point)
    if problems := [note for note in notes if str(point) in note]:
        return status(state="corrupt", detail=problems[-1], log=str(point))
    if submitted and submitted.job:
        return status(state="waiting", job=submitted.job)
    return status(state="missing", detail="run the same command again")


def _queued(point: SubmittedPoint, job: QueuedJob) -> PointStatus:
    status = partial(PointStatus, spec_id=point.spec_id, job=job.job)
    if not job.has_started:
        return status(state="waiting", detail=job.reason, log=str(point.log))
    attempts = point.attempts()
    step = _progress(attempts[-1]) if attempts else "starting"
    return status(
        state="suspended" if job.state == "SUSPENDED" else "running",
        detail=f"{step}, {job.time_left} left",
        nodes=job.nodes,
        log=str(attempts[-1] / "rank_000.log" if attempts else point.log),
    )


def _recorded(record: RunRecord, point: Path) -> PointStatus:
    log = point / record.record_id.split("/")[1] / "rank_000.log"
    ended = datetime.now(UTC) - datetime.fromisoformat(record.ended_at)
    return PointStatus(
        spec_id=record.spec_id,
        state=record.status,
        evidence=" ".join(filter(None, [record.provenance, record.variant])),
        ended=f"{_words(ended.total_seconds())} ago",
        detail=record.reason,
        job=str(record.slurm.get("job", "")),
        nodes=str(record.slurm.get("nodes", "")),
        log=next((str(p) for p in (log, Path(record.slurm.get("log", "/-"))) if p.exists()), ""),
    )


def _newest(point: Path, notes: list[str]) -> RunRecord | None:
    """The record to show: of those with the newest record's kind of evidence, a success if there is
    one, else the newest. Unreadable ones become notes."""
    records = [*read_records([point], notes)]
    newest = max(records, key=lambda record: record.ended_at, default=None)
    if newest is None:
        return None
    kind = newest.provenance, newest.variant
    alike = [record for record in records if (record.provenance, record.variant) == kind]
    return max(alike, key=lambda record: (record.status == "ok", record.ended_at))


def _is_answered(record: RunRecord, others: list[RunRecord]) -> bool:
    """Whether a point had no plan with what was ``auto``, and a later search found one: that is
    another point by its name, and the same by what was asked."""
    return record.status == "infeasible" and any(
        other.ended_at >= record.ended_at
        and other.status != "infeasible"
        and _is_choice_for(record.spec, other.spec)
        for other in others
    )


def _is_choice_for(asked: Any, chosen: Any) -> bool:
    """Whether two specs differ only where the first has ``auto``."""
    if isinstance(asked, Mapping) and isinstance(chosen, Mapping):
        same_keys = asked.keys() == chosen.keys()
        return same_keys and all(_is_choice_for(asked[key], chosen[key]) for key in asked)
    return bool(asked == "auto" or asked == chosen)


def _progress(attempt: Path) -> str:
    """The last event of rank 0, and how long ago it was."""
    path = rank_file(attempt, 0)
    events = read_events(path)
    if not events:
        return "starting"
    steps = of_kind(events, "warmup", "step")
    event = f"step {steps[-1]['index']}" if steps else str(events[-1]["event"])
    return f"{event} {_words(age_s(path))} ago"


def _words(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def print_points(points: list[PointStatus]) -> None:
    """Every point with its state and what is known of it, and below it, where it did not end well,
    the reason and the log, each on a line of its own. A terminal folds long lines between words; in
    a file they stay whole. The last line counts the states."""
    console = Console(highlight=False)
    width = console.width if console.is_terminal else _FILE_WIDTH
    names = max(len(point.spec_id) for point in points)
    states = max(len(point.state) for point in points)
    for point in points:
        has_ended = point.state not in _NOT_ENDED
        # What was left to a tuner says nothing of a point.
        facts = [" ".join(f"{k}={v}" for k, v in point.differs.items() if v != "auto")]
        facts += [point.evidence, point.ended, "" if has_ended else point.detail]
        facts += [f"job {point.job}"] * bool(point.job) + [f"on {point.nodes}"] * bool(point.nodes)
        row = f"{point.spec_id:<{names}}  {point.state:<{states}}  {', '.join(filter(None, facts))}"
        first, *more = _folded(row, width)
        line = Text(first)
        line.stylize(_COLOURS.get(point.state, "red"), names + 2, names + 2 + len(point.state))
        console.print(line, soft_wrap=True)
        if has_ended:
            more += _folded(f"{_INDENT}{point.detail}", width)
        if point.log and point.state not in ("ok", "waiting"):
            more.append(f"{_INDENT}{point.log}")
        for text in more:
            console.print(text, soft_wrap=True, markup=False)
    counts = Counter(point.state for point in points)
    console.print(", ".join(f"{number} {state}" for state, number in sorted(counts.items())))


def _folded(text: str, width: int) -> list[str]:
    """The lines of a text; only a single word may be wider than ``width``."""
    return textwrap.wrap(
        text,
        width,
        subsequent_indent=_INDENT,
        break_long_words=False,
        break_on_hyphens=False,
    )
