"""Submits a sweep: freezes its points, writes scripts, submits the arrays and the report job."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from rich.console import Console

from benchmarks import CHECKOUT
from benchmarks.launch.owner import LockedError, only_one
from benchmarks.launch.points import Point, freeze, or_unwritten, unwritten_record, write_unstarted
from benchmarks.launch.slurm.client import (
    ClusterFacts,
    NoAnswerError,
    SlurmError,
    cluster_facts,
    find_job,
    site_defaults,
    submit,
)
from benchmarks.launch.slurm.options import Flags, SlurmOptions, words
from benchmarks.launch.slurm.script import (
    MAX_ARRAY_SIZE,
    Array,
    array_flags,
    checkout_of,
    group,
    nodes_of,
    render_array,
    render_report,
    report_flags,
    resources_of,
)
from benchmarks.launch.slurm.submissions import (
    Submission,
    SubmittedArray,
    View,
    close_ended,
    look,
    underway,
    unreported,
)
from benchmarks.launch.sweep import SweepProgress
from benchmarks.records.record import RunRecord
from benchmarks.specification.run_spec import SpecError
from zeropp.sim.simulator import simulate

_FLAG = re.compile(r"^#SBATCH --([\w-]+)", re.M)
_OUT = Console(soft_wrap=True, markup=False, highlight=False)


@dataclass(frozen=True)
class Sweep:
    """One call of the launcher: its folders and options."""

    directory: Path  # RUNS_DIR/slurm/<sweep>
    runs_dir: Path
    options: SlurmOptions

    def arrays(self, points: Sequence[Point], max_array_size: int) -> list[Array]:
        """The points grouped by their resources."""
        sized = [(p, resources_of(p.spec, self.options, _predicted_step_s(p))) for p in points]
        return group(sized, self.directory, self.directory.name, max_array_size)

    def scripts(self, arrays: Sequence[Array]) -> dict[Path, str]:
        """The text of every script by its path, the report's last; none without arrays."""
        if not arrays:
            return {}
        name, directory = self.directory.name, self.directory
        report = render_report(directory, name, self.options, self.runs_dir)
        scripts = {a.script: render_array(a, self.options, self.runs_dir) for a in arrays}
        return scripts | {Submission(directory=directory, arrays=[]).report_script: report}


def say(line: str) -> None:
    """Print one line without wrapping it."""
    _OUT.print(line)


def _predicted_step_s(point: Point) -> float | None:
    """The simulated step time; None on CPUs, where the simulator does not know how many ranks share
    a core."""
    if point.plan is None or point.spec.cluster.device.is_cpu:
        return None
    return simulate(point.plan, point.spec.cluster).step_s


def show(points: Sequence[Point], sweep: Sweep) -> None:
    """Print each point's resources and every script, without writing or submitting anything."""
    try:
        size = cluster_facts().max_array_size
    except SlurmError:
        size = MAX_ARRAY_SIZE
    arrays = sweep.arrays(points, size)
    for array in arrays:
        asks = " ".join(_asks(array_flags(array, sweep.options)))
        for index, spec_id in enumerate(array.spec_ids):
            say(f"  {spec_id}: task {index} of {array.name}: {asks}")
    for array in arrays[:1]:
        _say_site_defaults(array, sweep.options)
    for path, script in sweep.scripts(arrays).items():
        say(f"# --- {path}\n{script}")


def _asks(flags: Flags) -> list[str]:
    """The flags that ask for resources, without names, logs and bookkeeping."""
    hidden = ("job-name", "array", "output", "open-mode", "signal", "requeue")
    return words({name: value for name, value in flags.items() if name not in hidden})


def submit_points(points: Sequence[Point], sweep: Sweep, facts: ClusterFacts) -> list[RunRecord]:
    """Submit the arrays and the report job; returns records of points that Slurm refused.

    Raises OSError if files cannot be written.
    """
    if not points:
        return []
    facts = facts if facts.identity else cluster_facts()
    arrays = _prepare(sweep.arrays(points, facts.max_array_size), sweep)
    submission = Submission(
        directory=sweep.directory,
        arrays=[SubmittedArray(name=array.name, spec_ids=array.spec_ids) for array in arrays],
        cluster=facts.identity,
        user=os.getuid(),
        host=socket.gethostname(),
    )
    submission.write()
    _say_site_defaults(arrays[0], sweep.options)
    records: list[RunRecord] = []
    for number, array in enumerate(arrays):
        before = submission.arrays[number - 1].job if number and sweep.options.chain else ""
        submission.arrays[number] = _submit_array(array, sweep.options, before)
        submission.write()
        records += _say_submitted(array, submission.arrays[number], sweep.runs_dir)
    if any(array.job for array in submission.arrays):
        _submit_report(submission, sweep.options)
        say(f"  scripts     {submission.directory}")
        say(f"  watch with  python -m benchmarks.status {sweep.runs_dir}")
    return records


def _prepare(arrays: list[Array], sweep: Sweep) -> list[Array]:
    """Freeze every point and write every script; if that fails, the submission's folder is
    deleted."""
    try:
        scripts = sweep.scripts(arrays)
        for point in (point for array in arrays for point in array.points):
            frozen = sweep.directory / "specs" / point.spec.spec_id
            frozen.mkdir(parents=True)
            freeze(point, frozen, "slurm")
        for path, script in scripts.items():
            path.write_text(script)
        if sweep.options.snapshot:
            copy_checkout(checkout_of(sweep.directory, sweep.options))
    except BaseException:
        shutil.rmtree(sweep.directory, ignore_errors=True)
        raise
    return arrays


def copy_checkout(target: Path) -> None:
    """Copy the checkout: a clone at its commit with the files as they are now, so that ranks can
    still name the commit and what differs from it."""
    clone = ("clone", "--quiet", "--shared", "--no-checkout", str(CHECKOUT), str(target))
    _git(*clone)
    listed = _git(
        "-C", str(CHECKOUT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"
    )
    for name in filter(None, listed.split("\0")):
        source, copy = CHECKOUT / name, target / name
        if source.exists():  # and not deleted since it was committed
            copy.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():  # a link to a folder: git lists nothing below it
                copy.symlink_to(source.resolve())
            else:
                shutil.copy2(source, copy)
    _git("-C", str(target), "reset", "--quiet")


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], capture_output=True, text=True, timeout=300, check=False
    )
    if done.returncode:
        said = (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1]
        raise SpecError(f"launcher.snapshot=true: git cannot copy {CHECKOUT}: {said}")
    return done.stdout


def _submit_array(array: Array, options: SlurmOptions, before: str) -> SubmittedArray:
    """Submit one array, which begins after the job ``before`` has ended, if that is given."""
    flags = [f"--dependency=afterany:{before}"] if before else []
    told = partial(SubmittedArray, name=array.name, spec_ids=array.spec_ids)
    try:
        return told(job=submit(array.script, array_flags(array, options), *flags))
    except NoAnswerError as error:
        job = _found(array.name)
        return told(job=job) if job else told(error=str(error), lost=True)
    except SlurmError as error:
        return told(error=str(error))


def _found(name: str) -> str:
    """The id of the job whose sbatch did not answer; empty if there is none, or Slurm does not
    say."""
    try:
        return find_job(name)
    except SlurmError:
        return ""


def _say_submitted(array: Array, told: SubmittedArray, runs_dir: Path) -> list[RunRecord]:
    """Print what became of an array; if Slurm refused it, its points get records that say so."""
    size, count = array.resources, len(array.points)
    if told.job:
        unit = "GPUs" if size.has_gpus else "ranks"
        each = f"{size.nodes} x {size.ranks_per_node} {unit} each"
        say(f"  submitted   job {told.job}: {count} point{'s' * (count > 1)}, {each}")
        return []
    if told.lost:
        say(f"  unanswered  {array.name}: {told.error}; the same command looks for it again")
        return []
    return [not_submitted(point, runs_dir, told.error) for point in array.points]


def not_submitted(point: Point, runs_dir: Path, why: str) -> RunRecord:
    """Write a record of a point that could not be submitted; the point counts as missing."""
    reason = f"not submitted: {why}"
    refuse = partial(
        write_unstarted, point, runs_dir, launcher="slurm", status="failed", reason=reason
    )
    return or_unwritten(point, "slurm", lambda: refuse(interrupted=True))


def _say_site_defaults(array: Array, options: SlurmOptions) -> None:
    for name, value in site_defaults(os.environ, array_flags(array, options)).items():
        say(f"  environment {name}={value} applies: launcher.sbatch does not set this flag")


def _submit_report(submission: Submission, options: SlurmOptions) -> None:
    flags = report_flags(submission.directory, submission.name, options)
    _submit_report_script(submission, list(flags))


def report_again(submission: Submission) -> None:
    """Submit the report job of a submission that has none while its points are under way."""
    try:
        flags = _FLAG.findall(submission.report_script.read_text(errors="replace"))
    except OSError:
        return
    _submit_report_script(submission, flags)


def _submit_report_script(submission: Submission, owned: Sequence[str]) -> None:
    jobs = ":".join(array.job for array in submission.arrays if array.job)
    try:
        job = submit(submission.report_script, owned, f"--dependency=afterany:{jobs}")
    except SlurmError as error:
        say(f"  report      {error}")
        return
    if not submission.is_damaged:
        replace(submission, report_job=job).write()
    say(f"  report      job {job}, after all of them")


# Submits points to Slurm: one array per set of resources, then a report job.
#
# Frozen specs and scripts stay on disk beside each other. A point whose job waits or runs, or may
# do so, is never submitted again. Only one process at a time submits into a runs folder.


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
