"""Submit points to Slurm: one array for the points with equal resources, then a report job.

Every point gets its own nodes and GPUs. Specs are frozen and scripts kept on disk beside them;
a point whose job is still in the queue is never submitted again.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.launch.points import Point, freeze, write_unstarted
from benchmarks.launch.progress import SweepProgress
from benchmarks.launch.slurm.client import SlurmError, submit
from benchmarks.launch.slurm.jobs import Submission, SubmittedArray, close_ended, look, underway
from benchmarks.launch.slurm.script import (
    Array,
    SlurmOptions,
    group,
    nodes_of,
    read_options,
    render_array,
    render_report,
    resources_of,
)
from benchmarks.records.record import RunRecord
from zeropp.sim.simulator import simulate

_GIB = 2**30
_OUT = Console(soft_wrap=True, markup=False, highlight=False)


def check(points: Sequence[Point], options: dict[str, Any]) -> None:
    """Refuse unknown options and ranks that do not divide over their nodes; raises SpecError."""
    read_options(options)
    for point in points:
        nodes_of(point.spec)


def launch(
    points: Sequence[Point], options: dict[str, Any], runs_dir: Path, progress: SweepProgress
) -> list[RunRecord]:
    """Submit what is not in the queue yet; the records are of points that end here and now."""
    settings = read_options(options)
    runs_dir = runs_dir.resolve()
    sweep = f"zeropp-{datetime.now(UTC).strftime('%Y%m%dT%H%M%S')}-{secrets.token_hex(2)}"
    submission = runs_dir / "slurm" / sweep
    judged = [(point, _too_large(point)) for point in points]
    todo = [point for point, reason in judged if not reason]
    refused = [(point, reason) for point, reason in judged if reason]
    if settings.dry_run:
        _show(todo, refused, settings, submission, runs_dir)
        return []
    records = [write_unstarted(p, runs_dir, "slurm", "infeasible", why) for p, why in refused]
    try:
        todo = _not_underway(todo, runs_dir)
        if todo:
            records += _submit(todo, settings, submission, runs_dir)
    except SlurmError as error:  # the queue could not be read: what is in it must not be doubled
        records += _not_submitted(todo, runs_dir, str(error))
    for record in records:
        progress.finished(record)
    return records


def _show(
    points: Sequence[Point],
    refused: Sequence[tuple[Point, str]],
    options: SlurmOptions,
    submission: Path,
    runs_dir: Path,
) -> None:
    """Print what would be submitted; write nothing."""
    for point, reason in refused:
        _OUT.print(f"  infeasible  {point.spec.spec_id}: {reason}")
    arrays = _arrays(points, options, submission)
    for path, script in _scripts(arrays, options, submission, runs_dir).items():
        _OUT.print(f"# --- {path}\n{script}")


def _arrays(points: Sequence[Point], options: SlurmOptions, submission: Path) -> list[Array]:
    sized = [(p, resources_of(p.spec, options, _predicted_step_s(p))) for p in points]
    return group(sized, submission, submission.name)


def _predicted_step_s(point: Point) -> float | None:
    """The simulator's step; None on CPUs, where it cannot know how many ranks share a core."""
    if point.plan is None or point.spec.cluster.device.is_cpu:
        return None
    return simulate(point.plan, point.spec.cluster).step_s


def _scripts(
    arrays: Sequence[Array], options: SlurmOptions, submission: Path, runs_dir: Path
) -> dict[Path, str]:
    """Every script of a submission by its place, the report's last; none without points."""
    if not arrays:
        return {}
    report = render_report(submission, submission.name, options, runs_dir)
    scripts = {array.script: render_array(array, options, runs_dir) for array in arrays}
    return scripts | {_report_script(submission): report}


def _prepare(
    points: Sequence[Point], options: SlurmOptions, submission: Path, runs_dir: Path
) -> list[Array]:
    """Freeze every point and write every script; nothing is written where one cannot be."""
    arrays = _arrays(points, options, submission)
    scripts = _scripts(arrays, options, submission, runs_dir)
    for point in points:
        frozen = submission / "specs" / point.spec.spec_id
        frozen.mkdir(parents=True)
        freeze(point, frozen, "slurm")
    for path, script in scripts.items():
        path.write_text(script)
    return arrays


def _report_script(submission: Path) -> Path:
    return submission / f"{submission.name}-report.sbatch"


def _too_large(point: Point) -> str:
    """Why a plan is known not to fit, so that it does not wait in a queue; empty if it may."""
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


def _not_underway(points: Sequence[Point], runs_dir: Path) -> list[Point]:
    """Points that neither wait nor run, nor were found to have ended by themselves just now."""
    tasks, queued = look(runs_dir)
    closed = close_ended(tasks, queued, runs_dir)
    settled = {record.spec_id for record in closed if not record.interrupted}
    jobs = underway(tasks, queued)
    for point in points:
        job = jobs.get(point.spec.spec_id)
        if job:
            _OUT.print(
                f"  {job.state.lower():<10}  {point.spec.spec_id}: job {job.job}, left alone"
            )
    return [p for p in points if p.spec.spec_id not in settled | set(jobs)]


def _not_submitted(points: Sequence[Point], runs_dir: Path, why: str) -> list[RunRecord]:
    reason = f"not submitted: {why}"
    return [
        write_unstarted(p, runs_dir, "slurm", "failed", reason, interrupted=True) for p in points
    ]


def _submit(
    points: Sequence[Point], options: SlurmOptions, directory: Path, runs_dir: Path
) -> list[RunRecord]:
    """Submit the arrays and the report job; returns records of what Slurm refused."""
    arrays = _prepare(points, options, directory, runs_dir)
    submission = Submission(directory, [SubmittedArray(a.name, a.spec_ids) for a in arrays])
    submission.write()
    records: list[RunRecord] = []
    for number, array in enumerate(arrays):
        job, why = _try_to_submit(array.script)
        submission.arrays[number] = replace(submission.arrays[number], job=job, error=why)
        submission.write()
        if why:
            records += _not_submitted(array.points, runs_dir, why)
        else:
            _say_submitted(array, job)
    _submit_report(submission, runs_dir)
    return records


def _say_submitted(array: Array, job: str) -> None:
    size, count = array.resources, len(array.points)
    each = f"{size.nodes} x {size.gpus_per_node} GPUs each"
    _OUT.print(f"  submitted   job {job}: {count} point{'s' * (count > 1)}, {each}")


def _submit_report(submission: Submission, runs_dir: Path) -> None:
    jobs = [array.job for array in submission.arrays if array.job]
    if not jobs:
        return
    script = _report_script(submission.directory)
    job, why = _try_to_submit(script, f"--dependency=afterany:{':'.join(jobs)}")
    replace(submission, report_job=job).write()
    _OUT.print(f"  report      {f'job {job}, after all of them' if job else why}")
    _OUT.print(f"  scripts     {submission.directory}")
    _OUT.print(f"  watch with  python -m benchmarks.status {runs_dir}")


def _try_to_submit(script: Path, *flags: str) -> tuple[str, str]:
    """The job's id, or why there is none."""
    try:
        return submit(script, *flags), ""
    except SlurmError as error:
        return "", str(error)
