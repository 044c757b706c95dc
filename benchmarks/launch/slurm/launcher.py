"""Submits points to Slurm: one array per set of resources, then a report job.

Frozen specs and scripts stay on disk beside each other. A point whose job waits or runs, or may do
so, is never submitted again. Only one process at a time submits into a runs folder.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.launch.folder_lock import LockedError, only_one
from benchmarks.launch.points import Point, or_unwritten, unwritten_record, write_unstarted
from benchmarks.launch.slurm.arrays import nodes_of
from benchmarks.launch.slurm.jobs import close_ended, underway, unreported
from benchmarks.launch.slurm.options import SlurmOptions
from benchmarks.launch.slurm.slurm_command import SlurmError
from benchmarks.launch.slurm.submit import (
    Sweep,
    not_submitted,
    report_again,
    say,
    show,
    submit_points,
)
from benchmarks.launch.slurm.view import View, look
from benchmarks.launch.sweep_progress import SweepProgress
from benchmarks.records.record import RunRecord

_GIB = 2**30
_PURPOSE = "submits into this folder"
_WAIT_S = 1800.0  # a submission of many arrays with a slow sbatch, each call bounded


def check(points: Sequence[Point], options: SlurmOptions) -> None:
    """Raise SpecError if the ranks of a point do not divide among its nodes."""
    del options
    for point in points:
        nodes_of(point.spec)


def launch(
    points: Sequence[Point], options: SlurmOptions, runs_dir: Path, progress: SweepProgress
) -> list[RunRecord]:
    """Submit the points that are not in the queue. The records that it returns are of points that
    end here, because they cannot fit or were refused."""
    runs_dir = runs_dir.resolve()
    name = f"zeropp-{datetime.now(UTC).strftime('%Y%m%dT%H%M%S')}-{secrets.token_hex(2)}"
    sweep = Sweep(runs_dir / "slurm" / name, runs_dir, options)
    reasons = {point.spec.spec_id: too_large(point) for point in points}
    todo = [point for point in points if not reasons[point.spec.spec_id]]
    refused = [point for point in points if reasons[point.spec.spec_id]]
    if options.dry_run:
        for point in refused:
            say(f"  infeasible  {point.spec.spec_id}: {reasons[point.spec.spec_id]}")
        show(todo, sweep)
        return []
    records = [_refuse(point, reasons[point.spec.spec_id], runs_dir) for point in refused]
    records += _submit_missing(todo, sweep)
    for record in records:
        progress.finished(record)
    return records


def _refuse(point: Point, why: str, runs_dir: Path) -> RunRecord:
    return or_unwritten(
        point,
        "slurm",
        lambda: write_unstarted(point, runs_dir, launcher="slurm", status="infeasible", reason=why),
    )


def _submit_missing(points: list[Point], sweep: Sweep) -> list[RunRecord]:
    """Submit the points for which no job waits or runs, while this process holds the lock."""
    if not points and not (sweep.runs_dir / "slurm").exists():
        return []
    try:
        with only_one(sweep.runs_dir / "slurm" / ".lock", _PURPOSE, _say_waiting, _WAIT_S):
            view = look(sweep.runs_dir)
            todo = _not_underway(points, view)
            for submission in unreported(view):
                report_again(submission)
            return submit_points(todo, sweep, view.facts)
    except (SlurmError, LockedError) as error:  # what is in the queue must not be doubled
        return [not_submitted(point, sweep.runs_dir, str(error)) for point in points]
    except OSError as error:
        return [unwritten_record(point, "slurm", error) for point in points]


def _say_waiting(line: str) -> None:
    say(f"  {line}")


def _not_underway(points: Sequence[Point], view: View) -> list[Point]:
    """The points for which no job waits or runs, and which have not just been found to be over."""
    closed = close_ended(view)
    settled = {record.spec_id for record in closed if not record.interrupted}
    jobs = underway(view)
    for problem in view.problems:
        say(f"  note        {problem}")
    for point in points:
        job = jobs.get(point.spec.spec_id)
        if job:
            state = f"job {job.job}, left alone" if job.is_seen else f"left alone: {job.reason}"
            say(f"  {job.state.lower():<10}  {point.spec.spec_id}: {state}")
    return [p for p in points if p.spec.spec_id not in settled | set(jobs)]


def too_large(point: Point) -> str:
    """Why a plan cannot fit the memory, so that it is not submitted; empty if it may fit."""
    if point.plan is None:
        return ""
    device = point.spec.cluster.device
    peak_bytes, rank = max((m.total, rank) for rank, m in enumerate(point.plan.memory))
    if peak_bytes <= device.usable_bytes:
        return ""
    return (
        f"predicted peak of {peak_bytes / _GIB:.1f} GiB on pipeline rank {rank} is over the "
        f"{device.usable_bytes / _GIB:.1f} for tensors: cluster.device.memory_gib="
        f"{device.memory_gib:g} less reserved_gib={device.reserved_gib:g} (try more GPUs, a "
        "smaller microbatch_size, or contender.recompute=full)"
    )
