"""``launcher=slurm``: freezes points, writes scripts, submits one array per set of resources, and a
report job after them. Frozen specs and scripts stay on disk beside each other."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from benchmarks import CHECKOUT
from benchmarks.launch.attempt import Ending, freeze, new_header
from benchmarks.launch.options import Flags, SlurmOptions, words
from benchmarks.launch.points import Point, records_of
from benchmarks.launch.running import LaunchError, Sweep, SweepProgress, check_rank, refuse
from benchmarks.launch.slurm.client import (
    ClusterFacts,
    NoAnswerError,
    SlurmError,
    absence,
    cluster_facts,
    end_with_the_launcher,
    site_defaults,
    submit,
)
from benchmarks.launch.slurm.script import (
    Array,
    array_flags,
    checkout_of,
    group,
    nodes_of,
    render_array,
    render_report,
    resources_of,
)
from benchmarks.launch.slurm.submissions import (
    Submission,
    SubmittedArray,
    close_ended,
    query_slurm,
    report_name,
    write_submission,
)
from benchmarks.records.record import RunRecord
from benchmarks.specification import SpecError
from zeropp.price.simulator import simulate

_GIB = 2**30
_WAIT_S = 10.0
_FLAG = re.compile(r"^#SBATCH --([\w-]+)", re.M)
_OUT = Console(soft_wrap=True, markup=False, highlight=False)


@dataclass(frozen=True)
class SlurmSweep:
    """One call of the launcher: its folders and options."""

    directory: Path  # RUNS_DIR/slurm/<sweep>
    runs_dir: Path
    options: SlurmOptions

    def arrays(self, points: Sequence[Point], max_array_size: int) -> list[Array]:
        """The points grouped by their resources, with the simulated step time of each, but on CPUs,
        where the simulator lacks how many ranks share a core."""
        sized = []
        for point in points:
            cluster, step_s = point.spec.cluster, None
            if point.plan is not None and not cluster.device.is_cpu:
                step_s = simulate(point.plan, cluster).step_s
            sized.append((point, resources_of(point.spec, self.options, step_s)))
        return group(sized, self.directory, self.directory.name, max_array_size)

    def scripts(self, arrays: Sequence[Array]) -> dict[Path, str]:
        """The text of every script by its path, the report's last; none without arrays."""
        scripts = {a.script: render_array(a, self.options, self.runs_dir) for a in arrays}
        report = render_report(self.directory, self.directory.name, self.options, self.runs_dir)
        return scripts | {_report_script(self.directory): report} if arrays else {}


def check(points: Sequence[Point], options: SlurmOptions, sweep: Sweep) -> None:
    """Raise SpecError if there is no Slurm here, or if the ranks of a point do not divide among its
    nodes."""
    for point in points:
        check_rank(point, here=False)
    if sweep.retries and not options.wait:
        raise SpecError(f"retries={sweep.retries}: needs launcher.wait=true, or nobody tries again")
    if not options.dry_run and (why := absence()):
        raise SpecError(
            f"launcher=slurm: {why} (use a login node of the cluster, "
            "launcher.dry_run=true to see the scripts, or launcher=local)"
        )
    if len(points) == 1:  # in a sweep, such a point is infeasible
        nodes_of(points[0].spec)


def settle(runs_dir: Path) -> dict[str, str]:
    """Record the attempts that are over, submit report jobs that are missing, and return the points
    under way. Raises LaunchError if Slurm does not answer."""
    try:
        view = query_slurm(runs_dir.resolve())
        close_ended(view)
        under_way = view.under_way()
    except SlurmError as error:
        raise LaunchError(f"{error}; nothing was submitted") from None
    for problem in view.problems:
        say(f"  note        {problem}")
    for directory, submission in view.unreported().items():
        _submit_report(directory, submission)
    return under_way


def launch(
    points: Sequence[Point], options: SlurmOptions, runs_dir: Path, progress: SweepProgress
) -> list[RunRecord]:
    """Submit the points. The records that it returns are of points that end here, because they
    cannot fit or were refused. Raises LaunchError if Slurm does not answer."""
    runs_dir = runs_dir.resolve()
    models = list(dict.fromkeys(point.spec.model.name for point in points))
    label = options.name or "+".join(["zeropp", *models[:2], *["more"] * (len(models) > 2)])
    name = f"{label}-{datetime.now(UTC).strftime('%Y%m%dT%H%M%S')}-{secrets.token_hex(2)}"
    sweep = SlurmSweep(runs_dir / "slurm" / name, runs_dir, options)
    reasons = {point.spec.spec_id: infeasible(point) for point in points}
    todo = [point for point in points if not reasons[point.spec.spec_id]]
    refused = {p.spec.spec_id: p for p in points if reasons[p.spec.spec_id]}.values()
    if options.dry_run:
        for point in refused:
            say(f"  infeasible  {point.spec.spec_id}: {reasons[point.spec.spec_id]}")
        # Print each point's resources and every script, without writing or submitting anything
        try:
            facts = cluster_facts()
        except SlurmError:
            facts = ClusterFacts()
        arrays = sweep.arrays(todo, facts.max_array_size)
        hidden = ("job-name", "array", "output", "open-mode", "signal")
        for array in arrays:
            flags = array_flags(array, sweep.options)
            asks = " ".join(words({k: v for k, v in flags.items() if k not in hidden}))
            for index, spec_id in enumerate(array.spec_ids):
                say(f"  {spec_id}: task {index} of {array.name}: {asks}")
        for array in arrays[:1]:
            _say_site_defaults(array_flags(array, sweep.options))
        for path, script in sweep.scripts(arrays).items():
            say(f"# --- {path}\n{script}")
        return []
    records = [
        refuse(p, options, runs_dir, Ending("infeasible", reasons[p.spec.spec_id])) for p in refused
    ]
    try:
        records += _submit_points(todo, sweep) if todo else []
    except SlurmError as error:
        raise LaunchError(f"{error}; nothing was submitted") from None
    for record in records:
        progress.finished(record)
    return records


def wait(points: Sequence[Point], runs_dir: Path, before: Collection[str]) -> list[RunRecord]:
    """Wait until none of the points is under way, also while Slurm does not answer; returns their
    records except those with the ids ``before``, or else a success of the point if there is one.
    Raises LaunchError if one has left none."""
    left, records = {point.spec.spec_id: point for point in points}, []
    with SweepProgress(len(left)) as progress:
        while left:
            try:
                under_way = settle(runs_dir)
            except LaunchError as error:
                under_way = dict.fromkeys(left, str(error))
            for spec_id in left.keys() - under_way.keys():
                found = list(records_of(left.pop(spec_id).spec, runs_dir))
                if not found:
                    raise LaunchError(f"{runs_dir / spec_id}: has ended without a record")
                best = max(found, key=lambda r: (r.status == "ok", r.ended_at))
                new = [record for record in found if record.record_id not in before] or [best]
                records += new
                progress.finished(new[-1])
            for spec_id, point in [*left.items()][:1]:
                progress.update(point, under_way[spec_id])
                time.sleep(_WAIT_S)
    return records


def say(line: str) -> None:
    """Print one line without wrapping it."""
    _OUT.print(line)


def _say_site_defaults(flags: Flags) -> None:
    for name, value in site_defaults(os.environ, flags).items():
        say(f"  environment {name}={value} applies: launcher.sbatch does not set this flag")


def _submit_points(points: Sequence[Point], sweep: SlurmSweep) -> list[RunRecord]:
    """Submit the arrays and the report job; returns records of points that Slurm refused.

    Raises SlurmError, and OSError if files cannot be written.
    """
    facts = cluster_facts()
    arrays = _prepare(sweep.arrays(points, facts.max_array_size), sweep)
    submission = Submission(
        arrays=[
            SubmittedArray(name=a.name, spec_ids=a.spec_ids, attempts=list(a.attempts))
            for a in arrays
        ],
        has_report=not sweep.options.wait,
        cluster=facts.identity,
        user=os.getuid(),
        host=socket.gethostname(),
    )
    write_submission(sweep.directory, submission)
    _say_site_defaults(array_flags(arrays[0], sweep.options))
    records: list[RunRecord] = []
    for number, array in enumerate(arrays):
        before = submission.arrays[number - 1].job if number and sweep.options.chain else ""
        submission.arrays[number] = _submit_array(
            array, submission.arrays[number], sweep.options, before
        )
        write_submission(sweep.directory, submission)
        if why := submission.arrays[number].error:
            ending = Ending("failed", f"not submitted: {why}", interrupted=True)
            records += [refuse(p, sweep.options, sweep.runs_dir, ending) for p in array.points]
    if any(array.job for array in submission.arrays):
        if submission.has_report:
            _submit_report(sweep.directory, submission)
        say(f"  scripts     {sweep.directory}")
        say(f"  watch with  zeropp status {sweep.runs_dir}")
    return records


def _prepare(arrays: list[Array], sweep: SlurmSweep) -> list[Array]:
    """Freeze every point and write every script; if that fails, the submission's folder is
    deleted."""
    try:
        scripts = sweep.scripts(arrays)
        for point in (point for array in arrays for point in array.points):
            frozen = sweep.directory / "specs" / point.spec.spec_id
            frozen.mkdir(parents=True, exist_ok=True)  # repeats share it
            freeze(point.spec, new_header("slurm", point.plan), frozen)
        for path, script in scripts.items():
            path.write_text(script, encoding="utf-8")
        if sweep.options.snapshot:
            copy_checkout(checkout_of(sweep.directory, sweep.options))
    except BaseException:
        shutil.rmtree(sweep.directory, ignore_errors=True)
        raise
    return arrays


def copy_checkout(target: Path) -> None:
    """Copy the checkout: a clone at its commit with the files as they are now, so that ranks can
    still name the commit and what differs from it."""
    _git("clone", "--quiet", "--shared", "--no-checkout", str(CHECKOUT), str(target))
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
        ["git", *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        preexec_fn=end_with_the_launcher,
    )
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1]
        raise SpecError(f"launcher.snapshot=true: git cannot copy {CHECKOUT}: {reason}")
    return done.stdout


def _submit_array(
    array: Array, submitted: SubmittedArray, options: SlurmOptions, before: str
) -> SubmittedArray:
    """Submit one array, which begins after the job ``before`` has ended, if that is given, and say
    what became of it."""
    flags = [f"--dependency=afterany:{before}"] if before else []
    try:
        job = submit(array.script, array_flags(array, options), *flags)
        submitted = replace(submitted, job=job)
    except NoAnswerError as error:
        say(f"  unanswered  {array.name}: {error}; the same command looks for it again")
    except SlurmError as error:
        submitted = replace(submitted, error=str(error))
    if submitted.job:
        size, count = array.resources, len(array.points)
        unit = "GPUs" if size.has_gpus else "ranks"
        machines = f"{size.nodes} x {size.ranks_per_node} {unit} each"
        say(f"  submitted   job {submitted.job}: {count} point{'s' * (count > 1)}, {machines}")
    return submitted


def _report_script(directory: Path) -> Path:
    return directory / f"{report_name(directory.name)}.sbatch"


def _submit_report(directory: Path, submission: Submission) -> None:
    """Submit the report job of a submission, after all of its arrays, and note its id."""
    jobs = ":".join(array.job for array in submission.arrays if array.job)
    script = _report_script(directory)
    try:
        owned = _FLAG.findall(script.read_text(errors="replace", encoding="utf-8"))
        job = submit(script, owned, f"--dependency=afterany:{jobs}")
        write_submission(directory, replace(submission, report_job=job))
    except (SlurmError, OSError) as error:
        say(f"  report      {error}")
        return
    say(f"  report      job {job}, after all of them")


def infeasible(point: Point) -> str:
    """Why a plan is not submitted: its ranks do not divide among nodes, or it cannot fit the
    memory. Empty if it may run."""
    if point.plan is None:
        return ""
    try:
        nodes_of(point.spec)
    except SpecError as error:
        return str(error)
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
