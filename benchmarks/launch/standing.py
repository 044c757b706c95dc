"""The state of every point of every sweep, from its folder and from Slurm's queue.

Attempts whose job ended without writing a record get one first, with the reason that Slurm gives.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.launch.local import close_abandoned
from benchmarks.launch.owner import QUIET_S, may_live, silence_s
from benchmarks.launch.slurm.client import QueuedJob, SlurmError
from benchmarks.launch.slurm.submissions import Task, View, close_ended, look, read_view, underway
from benchmarks.records.events import rank_file, read_events
from benchmarks.records.record import RecordError, RunRecord, find_records, read_record

_COLOURS = {"ok": "green", "running": "cyan", "waiting": "blue", "infeasible": "yellow"}
_OPTIONAL = ("detail", "job", "nodes", "log")  # columns that are left out if they are empty
_LOG_WIDTH = 140  # columns that a terminal needs to show the logs' paths in the table
_FILE_WIDTH = 400  # characters per line where the output is no terminal: one line per point


@dataclass(frozen=True, kw_only=True)
class Row:
    """One point's line in the table."""

    spec_id: str
    state: str  # missing, waiting, running, the status of its record, or corrupt
    detail: str  # while it runs, step and time left; otherwise the reason, in one line
    job: str
    nodes: str
    log: str


@dataclass(frozen=True)
class Standing:
    """The states of all points, and what could not be found out."""

    rows: list[Row]
    notes: list[str]  # one line per file that is damaged or could not be written
    problem: str = ""  # why Slurm could not be asked; empty if it answered


def standing(runs_dir: Path) -> Standing:
    """The state of every point, in the order of their names. Attempts that are over and have no
    record get one first."""
    notes = close_abandoned(runs_dir)
    problem = ""
    try:
        view = look(runs_dir)
        close_ended(view)
        jobs = underway(view)
    except SlurmError as error:
        view, jobs, problem = read_view(runs_dir), {}, str(error)
    notes += view.problems
    found = {path.name for path in runs_dir.iterdir() if path.is_dir()} - {"slurm"}
    folders = {name for name in found if not name.startswith(".")}
    names = sorted(folders | set(view.latest))
    rows = [_row(runs_dir / name, view, jobs.get(name), notes) for name in names]
    return Standing(rows, list(dict.fromkeys(notes)), problem)


def _row(point: Path, view: View, job: QueuedJob | None, notes: list[str]) -> Row:
    task = view.latest.get(point.name)
    if task and job:
        return _queued_row(task, job)
    # A folder whose name begins with a dot is not an attempt yet: its owner is being written.
    attempts = sorted(path for path in point.glob("[!.]*-*") if path.is_dir())
    unrecorded = [path for path in attempts if not (path / "record.json").exists()]
    alive = [path for path in unrecorded if may_live(path)]
    beating = [path for path in alive if silence_s(path) <= QUIET_S]
    if beating:  # a local run, or Slurm does not answer
        return _running_row(point, beating[-1])
    records, problems = _records(point)
    notes += problems
    if records:
        return _recorded_row(_telling(records), point)
    if problems:
        return Row(
            spec_id=point.name,
            state="corrupt",
            detail=problems[-1],
            job="",
            nodes="",
            log=str(point),
        )
    if alive:  # silent, but perhaps at work elsewhere
        return _running_row(point, alive[-1])
    detail = "" if task and task.job else "the same command submits or runs it"
    state = "waiting" if task and task.job else "missing"
    return Row(
        spec_id=point.name,
        state=state,
        detail=detail,
        job=task.job if task else "",
        nodes="",
        log="",
    )


def _running_row(point: Path, attempt: Path) -> Row:
    return Row(
        spec_id=point.name,
        state="running",
        detail=_progress(attempt),
        job="",
        nodes="",
        log=str(attempt),
    )


def _queued_row(task: Task, job: QueuedJob) -> Row:
    attempts = task.found_attempts()
    if not job.has_started or not (job.is_seen or attempts):
        return Row(
            spec_id=task.spec_id,
            state="waiting",
            detail=job.reason,
            job=job.job,
            nodes="",
            log=str(task.log),
        )
    step = _progress(attempts[-1]) if attempts else "starting"
    log = attempts[-1] / "rank_000.log" if attempts else task.log
    left = f"{job.time_left} left" if job.is_seen else job.reason
    return Row(
        spec_id=task.spec_id,
        state="running",
        detail=f"{step}, {left}",
        job=job.job,
        nodes=job.nodes,
        log=str(log),
    )


def _recorded_row(record: RunRecord, point: Path) -> Row:
    attempt = point / record.record_id.split("/")[1]
    log = attempt / "rank_000.log"
    slurm = record.slurm
    return Row(
        spec_id=record.spec_id,
        state=record.status,
        detail=record.reason,
        job=str(slurm.get("job", "")),
        nodes=str(slurm.get("nodes", "")),
        log=str(log if log.exists() else slurm.get("log", "")),
    )


def _telling(records: list[RunRecord]) -> RunRecord:
    """The record to show: of those with the newest record's kind of evidence, a success if there is
    one, else the newest."""
    newest = max(records, key=lambda record: record.ended_at)
    kind = newest.provenance, newest.variant
    of_kind = [record for record in records if (record.provenance, record.variant) == kind]
    return max(of_kind, key=lambda record: (record.status == "ok", record.ended_at))


def _records(point: Path) -> tuple[list[RunRecord], list[str]]:
    """(a point's readable records, one line per unreadable one)."""
    found, problems = [], []
    for path in find_records([point]) if point.exists() else ():
        try:
            found.append(read_record(path))
        except RecordError as error:
            problems.append(str(error))
    return found, problems


def _progress(attempt: Path) -> str:
    events = read_events(rank_file(attempt, 0))
    steps = [event for event in events if event["event"] in ("warmup", "step")]
    if steps:
        return f"step {steps[-1]['index']}"
    return str(events[-1]["event"]) if events else "starting"


def print_table(found: list[Row]) -> None:
    """The rows as a table. A terminal too narrow for paths shows the logs of those points below it
    that did not end well."""
    console = Console(width=None if sys.stdout.isatty() else _FILE_WIDTH, highlight=False)
    narrow = console.width < _LOG_WIDTH
    shown = [name for name in _OPTIONAL if not (narrow and name == "log")]
    columns = [name for name in shown if any(getattr(row, name) for row in found)]
    table = Table(box=None, pad_edge=False)
    for heading in ("point", "state", *columns):
        table.add_column(heading, overflow="fold", no_wrap=heading in ("point", "state"))
    for row in found:
        colour = _COLOURS.get(row.state, "red")
        cells = (escape(getattr(row, name)) for name in columns)
        table.add_row(row.spec_id, f"[{colour}]{row.state}[/]", *cells)
    console.print(table)
    for row in found if narrow else ():
        if row.log and row.state != "ok":
            console.print(f"{row.spec_id}: {row.log}", soft_wrap=True, markup=False)
    counts = Counter(row.state for row in found)
    console.print(", ".join(f"{number} {state}" for state, number in sorted(counts.items())))
