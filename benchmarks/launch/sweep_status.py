"""The state of every point of every sweep, from its folder and from Slurm's queue.

Attempts that are over and have no record get one first, with the reason that Slurm gives.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.launch.alive import age_s, is_alive
from benchmarks.launch.attempt import close_abandoned
from benchmarks.launch.slurm.client import QueuedJob, SlurmError
from benchmarks.launch.slurm.submissions import (
    SubmittedPoint,
    View,
    close_ended,
    query_slurm,
    read_view,
)
from benchmarks.records.events import of_kind, rank_file, read_events
from benchmarks.records.record import RecordError, RunRecord, find_records, read_record

_COLOURS = {"ok": "green", "running": "cyan", "waiting": "blue", "infeasible": "yellow"}
_OPTIONAL = ("evidence", "ended", "detail", "job", "nodes", "log")  # left out if they are empty
_LOG_WIDTH = 140  # columns that a terminal needs to show the logs' paths in the table
_FILE_WIDTH = 400  # characters per line where the output is no terminal: one line per point


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


@dataclass(frozen=True)
class SweepStatus:
    """The states of all points, and what could not be found out."""

    points: list[PointStatus]
    notes: list[str]  # one line per file that is damaged or could not be written
    problem: str = ""  # why Slurm could not be asked; empty if it answered


def sweep_status(runs_dir: Path) -> SweepStatus:
    """The state of every point, in the order of their names."""
    notes, problem = close_abandoned(runs_dir), ""
    try:
        view = query_slurm(runs_dir)
        close_ended(view)
    except SlurmError as error:
        view, problem = read_view(runs_dir), str(error)
    notes += view.problems
    under_way = {} if problem else view.under_way()
    folders = {path.name for path in runs_dir.iterdir() if path.is_dir()} - {"slurm"}
    names = sorted({name for name in folders if not name.startswith(".")} | set(view.latest))
    records = {name: _newest(runs_dir / name, notes) for name in names}
    known = [record for record in records.values() if record is not None]
    points = [
        _status(runs_dir / name, view, under_way.get(name, ""), record, notes)
        for name, record in records.items()
        if record is None or name in under_way or not _is_answered(record, known)
    ]
    return SweepStatus(points, list(dict.fromkeys(notes)), problem)


def _status(
    point: Path, view: View, under_way: str, record: RunRecord | None, notes: list[str]
) -> PointStatus:
    status = partial(PointStatus, spec_id=point.name)
    submitted = view.latest.get(point.name)
    job = view.queued.get(submitted.job) if submitted else None
    if submitted and job and under_way:
        return _queued(submitted, job)
    # A folder whose name begins with a dot is not an attempt yet.
    attempts = sorted(path for path in point.glob("[!.]*-*") if path.is_dir())
    alive = [p for p in attempts if not (p / "record.json").exists() and is_alive(p)]
    if alive:
        log = str(alive[-1] / "rank_000.log")
        return status(state="running", detail=_progress(alive[-1]), log=log)
    number = submitted.job if submitted else ""
    if under_way:
        return status(state="unseen", detail=under_way, job=number)
    if record is not None:
        return _recorded(record, point)
    if problems := [note for note in notes if str(point) in note]:
        return status(state="corrupt", detail=problems[-1], log=str(point))
    if number:
        return status(state="waiting", job=number)
    return status(state="missing", detail="the same command submits or runs it")


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
    slurm = record.slurm
    ended = datetime.now(UTC) - datetime.fromisoformat(record.ended_at)
    return PointStatus(
        spec_id=record.spec_id,
        state=record.status,
        evidence=" ".join(filter(None, [record.provenance, record.variant])),
        ended=f"{_words(ended.total_seconds())} ago",
        detail=record.reason,
        job=str(slurm.get("job", "")),
        nodes=str(slurm.get("nodes", "")),
        log=str(log if log.exists() else slurm.get("log", "")),
    )


def _newest(point: Path, notes: list[str]) -> RunRecord | None:
    """The record to show: of those with the newest record's kind of evidence, a success if there is
    one, else the newest. Unreadable ones become notes."""
    records = []
    for path in find_records([point]) if point.exists() else ():
        try:
            records.append(read_record(path))
        except RecordError as error:
            notes.append(str(error))
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


def print_table(points: list[PointStatus]) -> None:
    """The points as a table. A terminal too narrow for paths shows the logs of those points below
    it that did not end well."""
    console = Console(width=None if sys.stdout.isatty() else _FILE_WIDTH, highlight=False)
    narrow = console.width < _LOG_WIDTH
    shown = [name for name in _OPTIONAL if not (narrow and name == "log")]
    columns = [name for name in shown if any(getattr(point, name) for point in points)]
    table = Table(box=None, pad_edge=False)
    for heading in ("point", "state", *columns):
        is_whole = heading in ("point", "state", "evidence", "ended", "job")
        table.add_column(heading, overflow="fold", no_wrap=is_whole)
    for point in points:
        colour = _COLOURS.get(point.state, "red")
        cells = (escape(getattr(point, name)) for name in columns)
        table.add_row(point.spec_id, f"[{colour}]{point.state}[/]", *cells)
    console.print(table)
    for point in points if narrow else ():
        if point.log and point.state != "ok":
            console.print(f"{point.spec_id}: {point.log}", soft_wrap=True, markup=False)
    counts = Counter(point.state for point in points)
    console.print(", ".join(f"{number} {state}" for state, number in sorted(counts.items())))
