"""What was submitted, by whom and to which cluster, and what has become of it.

A submission is a folder ``RUNS_DIR/slurm/<sweep>/`` with scripts, logs, frozen specs, and
``submission.json``, which is written before the first sbatch: a job whose id never arrived is found
by its name, every other one by its id. It has at most one job per point.

**Under way.** All launchers that measure ask ``View.under_way``, so that none measures what another
does. A point is under way while its job is in the queue, or while an attempt of it is alive
(``alive.is_alive``), whoever started it: also a script that its controller has forgotten. The
queue's silence counts only where the submission's cluster is asked by its user (or root) and
answers; elsewhere a point that has no record is under way, because nobody can tell.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path

from pydantic import ValidationError

from benchmarks.launch.attempt import (
    PROVENANCE,
    DamagedError,
    Ending,
    close_attempt,
    frozen,
    is_alive,
    is_open,
    make_record,
)
from benchmarks.launch.slurm.client import (
    ClusterFacts,
    EndedJob,
    QueuedJob,
    cluster_facts,
    endings,
    find_job,
    known_to_controller,
    last_state,
    queued_jobs,
)
from benchmarks.launch.slurm.endings import ending_by_state, killed_script, reason, slurm_of
from benchmarks.records.record import RecordError, RunRecord, read_record, write_atomically
from benchmarks.specification.reading import adapter

_LOST = Ending("lost", "the job is gone, and Slurm does not say why", interrupted=True)
_UNSEEN = Ending("lost", "left the queue before it began: CANCELLED, or forgotten", True)


@dataclass(frozen=True, kw_only=True)
class SubmittedArray:
    """An array in ``submission.json``. Without ``job`` and ``error``, sbatch has not answered."""

    name: str
    spec_ids: list[str]
    job: str = ""
    error: str = ""  # why sbatch refused it
    attempts: list[str] = field(default_factory=list)  # see script.Array; empty: attempt_name's


@dataclass(frozen=True, kw_only=True)
class Submission:
    """Everything that one call of the launcher submitted: the content of ``submission.json``."""

    arrays: list[SubmittedArray]
    report_job: str = ""
    has_report: bool = True  # false: whoever waits for the points writes it
    cluster: str = ""  # ClusterFacts.identity; empty if it was not known
    user: int = 0
    host: str = ""


@dataclass(frozen=True, kw_only=True)
class SubmittedPoint:
    """One point of a submission: a task of one of its arrays."""

    spec_id: str
    job: str  # "17_3"; empty if it has none that is known
    directory: Path  # of the submission
    submission: Submission | None  # None if submission.json cannot be read
    log: Path
    point: Path  # the folder of its attempts
    attempt: str  # the name of its attempts, without the number of the restart
    refused: bool = False  # sbatch refused it

    def attempts(self) -> list[Path]:
        """Its attempts on disk, oldest first, without emptied ones."""
        named = {
            path: path.name.rpartition("-")[2] for path in self.point.glob(f"{self.attempt}-*")
        }
        restarts = {path: int(number) for path, number in named.items() if number.isdigit()}
        folders = [path for path in restarts if is_open(path) and any(path.iterdir())]
        return sorted(folders, key=restarts.__getitem__)

    def is_settled(self) -> bool:
        """Whether it has ended, in a way that no requeue changes."""
        attempts = self.attempts()
        record = _record_of(attempts[-1]) if attempts else None
        return record is not None and not record.interrupted


def report_name(sweep: str) -> str:
    """The name of a sweep's report job."""
    return f"{sweep}-report"


def attempt_name(submission: Path) -> str:
    """The name of a submission's attempts at its points, without the number of the restart. A
    job's number would not do: a controller that has lost its state gives it again."""
    return f"slurm-{submission.name.removeprefix('zeropp-')}"


def write_submission(directory: Path, submission: Submission) -> None:
    """Write ``submission.json``; raises OSError if that is impossible."""
    write_atomically(directory / "submission.json", json.dumps(asdict(submission), indent=1))


def read_submissions(runs_dir: Path) -> tuple[dict[Path, Submission | None], list[str]]:
    """(every submission by its folder, oldest first, None if it is damaged; a line per damage)."""
    submissions: dict[Path, Submission | None] = {}
    problems = []
    for directory in sorted((runs_dir / "slurm").glob("*")):
        if not directory.is_dir() or directory.name.startswith("."):
            continue
        path = directory / "submission.json"
        try:
            submissions[directory] = adapter(Submission).validate_json(path.read_bytes())
        except FileNotFoundError:  # killed before the first sbatch
            continue
        except (OSError, ValidationError) as error:
            submissions[directory] = None
            why = getattr(error, "strerror", None) or "no submission"
            way = f"remove {directory} if its jobs are gone"
            problems.append(f"{path}: not readable ({why}); its points are left alone: {way}")
    return submissions, problems


def points_of(
    directory: Path, submission: Submission | None, runs_dir: Path
) -> Iterator[SubmittedPoint]:
    """The points of a submission; if it is damaged, those whose specs were frozen in it."""
    arrays = submission.arrays if submission else []
    if submission is None:
        ids = sorted(path.name for path in (directory / "specs").glob("*"))
        arrays = [SubmittedArray(name=f"{directory.name}-0", spec_ids=ids)]
    for array in arrays:
        for index, spec_id in enumerate(array.spec_ids):
            yield SubmittedPoint(
                spec_id=spec_id,
                job=f"{array.job}_{index}" if array.job else "",
                directory=directory,
                submission=submission,
                log=directory / f"{array.name}-{index}.log",
                point=runs_dir / spec_id,
                attempt=array.attempts[index] if array.attempts else attempt_name(directory),
                refused=bool(array.error),
            )


@dataclass(kw_only=True)
class View:
    """The submissions and Slurm's queue, read in that order: otherwise an attempt that began in
    between would seem dead."""

    runs_dir: Path
    submissions: dict[Path, Submission | None]
    queued: dict[str, QueuedJob] = field(default_factory=dict)
    is_answered: bool = True  # whether Slurm said what is in the queue, or need not be asked
    facts: ClusterFacts = field(default_factory=ClusterFacts)
    problems: list[str] = field(default_factory=list)  # one line per damaged or unwritable file

    @cached_property
    def points(self) -> list[SubmittedPoint]:
        """The points that sbatch did not refuse, the oldest submission first."""
        points = [
            point
            for directory, submission in self.submissions.items()
            for point in points_of(directory, submission, self.runs_dir)
        ]
        return [point for point in points if not point.refused]

    @cached_property
    def latest(self) -> dict[str, SubmittedPoint]:
        """The newest submission of each point, but rather one whose job has begun, or waits."""

        def stage(point: SubmittedPoint) -> int:
            job = self.queued.get(point.job)
            return 1 + job.has_started if job else 0

        return {point.spec_id: point for point in sorted(self.points, key=stage)}

    def sees(self, point: SubmittedPoint) -> bool:
        """Whether this cluster shows this user all jobs of the point's submission. On another
        cluster its job ids belong to other jobs."""
        submission = point.submission
        if submission is None or os.getuid() not in (0, submission.user) or not self.is_answered:
            return False
        known = submission.cluster and self.facts.identity
        return not known or submission.cluster == self.facts.identity

    def under_way(self) -> dict[str, str]:
        """The points that wait or are measured, by whichever launcher, with a line on each, without
        those whose job has only to leave the queue."""
        lines = {
            attempt.parent.name: f"{attempt.name} is alive, and has no record yet"
            for launcher, provenance in PROVENANCE.items()
            for attempt in self.runs_dir.glob(f"*/{launcher}-*")
            if provenance == "measured" and is_open(attempt)
            if not _is_recorded(attempt) and is_alive(attempt)
        }
        for point in self.points:
            if line := self._under_way(point):
                lines[point.spec_id] = line
        return lines

    def _under_way(self, point: SubmittedPoint) -> str:
        attempts, job = point.attempts(), self.queued.get(point.job)
        record = _record_of(attempts[-1]) if attempts else None
        if job is not None:
            is_over = record is not None and not record.interrupted
            return "" if is_over else f"job {job.job} is {job.state.lower()}"
        if self.sees(point):
            return ""
        # A preempted job may begin another attempt, and so may one that nobody can ask for.
        is_open = record is None or record.status == "preempted"
        if not (is_open or (point.submission is None and record and record.interrupted)):
            return ""
        way = f"remove {point.directory} if its jobs are gone"
        if point.submission is None:
            return f"{point.directory / 'submission.json'} is damaged: {way}"
        name = point.submission.cluster.partition("@")[0] or "another cluster"
        submitter = f"user {point.submission.user} from {point.submission.host or 'elsewhere'}"
        return f"submitted to {name} by {submitter}, unseen from here: ask there, or {way}"

    def unreported(self) -> dict[Path, Submission]:
        """Submissions whose points are still under way and whose report job is not in the queue."""
        waiting = {p.directory: p for p in self.points if p.job in self.queued and self.sees(p)}
        return {
            directory: point.submission
            for directory, point in waiting.items()
            if point.submission is not None and point.submission.has_report
            if point.submission.report_job not in self.queued and self._under_way(point)
        }


def read_view(runs_dir: Path) -> View:
    """The view without asking Slurm."""
    submissions, problems = read_submissions(runs_dir)
    return View(runs_dir=runs_dir, submissions=submissions, problems=problems)


def query_slurm(runs_dir: Path) -> View:
    """The view with the queue; Slurm is asked only if something is not settled yet. Raises
    SlurmError if Slurm does not answer."""
    view = read_view(runs_dir)
    unsettled = {p.directory for p in view.points if p.submission and not p.is_settled()}
    if not unsettled:
        return view
    facts = cluster_facts()
    submissions = {d: _with_lost_jobs(d, s) for d, s in view.submissions.items()}
    users = [s.user for d, s in submissions.items() if s is not None and d in unsettled]
    view = replace(view, submissions=submissions, facts=facts, queued=queued_jobs(users))
    for point in view.points:  # a site may answer squeue from a cache
        is_silent = point.job and point.job not in view.queued and view.sees(point)
        if is_silent and not point.attempts() and (job := known_to_controller(point.job)):
            view.queued[point.job] = job
    return view


def _with_lost_jobs(directory: Path, submission: Submission | None) -> Submission | None:
    """A submission with the ids of arrays whose sbatch did not answer, found by their names."""
    if submission is None or all(array.job or array.error for array in submission.arrays):
        return submission
    arrays = [
        array if array.job or array.error else replace(array, job=find_job(array.name))
        for array in submission.arrays
    ]
    updated = replace(submission, arrays=arrays)
    if updated != submission:
        with suppress(OSError):  # found again next time
            write_submission(directory, updated)
    return updated


def close_ended(view: View) -> list[RunRecord]:
    """Write the record, with Slurm's reason, of every attempt whose own script can no longer do it,
    and of points whose job ended before it began. What cannot be recorded becomes a line of
    ``view.problems``."""
    open_points = [point for point in view.points if _may_be_over(point, view)]
    known = endings([p.job for p in open_points if p.job and view.sees(p)])
    closed = []
    for point in open_points:
        try:
            closed += list(_close(point, view, known.get(point.job, [])))
        except (DamagedError, OSError) as error:
            view.problems.append(str(error))
    return closed


def _may_be_over(point: SubmittedPoint, view: View) -> bool:
    attempts, job = point.attempts(), view.queued.get(point.job)
    if not attempts:
        return job is None and bool(point.job) and view.sees(point)
    *earlier, last = map(_is_recorded, attempts)
    return not all(earlier) or not (last or (job and job.has_started))


def _close(point: SubmittedPoint, view: View, known: list[EndedJob]) -> Iterator[RunRecord]:
    """Record the attempts of a point that are over; one that began meanwhile is read again."""
    job, over = view.queued.get(point.job), [ended for ended in known if ended.is_over]
    has_ended = bool(known) and known[-1].is_over
    attempts = point.attempts()
    is_unstarted = not attempts and (has_ended or not known)
    if is_unstarted and (record := _write_unstarted(point, over[-1] if over else None)):
        yield record
    for number, attempt in enumerate(attempts):
        if job is None:
            is_over = has_ended or (view.sees(point) and not is_alive(attempt))
        else:
            is_over = attempt != attempts[-1] or not job.has_started
        if _is_recorded(attempt) or not is_over:
            continue
        ended = over[min(number, len(over) - 1)] if over else None
        ending = reason(attempt, ended, point.log) or (None if ended else _LOST)
        slurm = slurm_of(attempt) | {"state": ended.state if ended else ""}
        if record := close_attempt(attempt, ending, slurm):
            yield record


def _write_unstarted(point: SubmittedPoint, ended: EndedJob | None) -> RunRecord | None:
    """Record a job that left the queue before its script began; None if somebody else has."""
    name = f"{point.attempt}-0"
    spec, header = frozen(point.directory / "specs" / point.spec_id)
    attempt = point.point / name
    ending, state = _UNSEEN, ""
    if ended is not None:
        ended = (last_state(point.job) if ended.word == "FAILED" else None) or ended
        state = ended.state
        words = f"ended before its script began (Slurm: {state}, exit code {ended.exit_code})"
        unexplained = Ending("failed", words, interrupted=True)
        ending = ending_by_state(ended) or killed_script(ended) or unexplained
    slurm = {"job": point.job, "restart": 0, "nodes": "", "log": str(point.log), "state": state}
    record = make_record(point.spec_id, name, spec, header, ending, slurm=slurm)
    return record if record.write(attempt / "record.json") else None


def _is_recorded(attempt: Path) -> bool:
    return (attempt / "record.json").exists()


def _record_of(attempt: Path) -> RunRecord | None:
    try:
        return read_record(attempt / "record.json")
    except RecordError:
        return None
