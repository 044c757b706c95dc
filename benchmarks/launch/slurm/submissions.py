"""Submissions on disk: what was submitted by whom and to which cluster, and the attempts at it.

A submission is a folder ``RUNS_DIR/slurm/<sweep>/`` with scripts, logs, frozen specs, and
``submission.json``. This file is written before the first sbatch, so that a job is found by its
name even if its id never arrived. If it is damaged, its content is found again from the scripts
beside it, because a job that is forgotten would be submitted twice.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from benchmarks.launch.finish import Ending, close_for_another
from benchmarks.launch.frozen import DamagedError
from benchmarks.launch.owner import QUIET_S, SILENT_S, silence_s
from benchmarks.launch.slurm.client import (
    UNSEEN,
    ClusterFacts,
    EndedJob,
    QueuedJob,
    cluster_facts,
    endings,
    find_job,
    queued_jobs,
)
from benchmarks.launch.slurm.endings import (
    ATTEMPT,
    before_ranks,
    ending_by_state,
    first_kill,
    is_complete,
    killed_script,
    killed_with_its_shell,
    left_on_signal,
    memory_kill,
    slurm_of,
    with_state,
)
from benchmarks.launch.slurm.script import report_name
from benchmarks.records.record import RecordError, RunRecord, read_record, write_atomically

_SPECS = re.compile(r"^specs=\(\n(.*?)^\)", re.M | re.S)


@dataclass(frozen=True, kw_only=True)
class SubmittedArray:
    """An array in ``submission.json``; ``job`` is empty until sbatch has answered."""

    name: str
    spec_ids: list[str]
    job: str = ""
    error: str = ""
    lost: bool = False  # sbatch did not answer, so it may or may not be submitted


@dataclass(frozen=True, kw_only=True)
class _Document:
    arrays: list[SubmittedArray]
    report_job: str = ""
    cluster: str = ""  # ClusterFacts.identity; empty if it was not known
    user: int | None = None
    host: str = ""


_DOCUMENT = TypeAdapter(_Document)


@dataclass(frozen=True, kw_only=True)
class Submission:
    """Everything that one call of the launcher submitted."""

    directory: Path
    arrays: list[SubmittedArray]
    report_job: str = ""
    cluster: str = ""
    user: int | None = None
    host: str = ""
    is_damaged: bool = False  # submission.json cannot be read, and is not overwritten

    @property
    def name(self) -> str:
        """The name of the sweep; the names of its jobs begin with it."""
        return self.directory.name

    @property
    def job_names(self) -> list[str]:
        """The names of its jobs; the report job is the last."""
        return [*(array.name for array in self.arrays), report_name(self.name)]

    @property
    def is_mine(self) -> bool:
        """Whether this user submitted it or may see all jobs. It is true for submissions of older
        versions, which do not name the user."""
        return self.user is None or os.getuid() in (0, self.user)

    @property
    def report_script(self) -> Path:
        """The path of its report job's script."""
        return self.directory / f"{report_name(self.name)}.sbatch"

    def write(self) -> None:
        """Write ``submission.json``; raises OSError if that is impossible."""
        document = _Document(
            arrays=self.arrays,
            report_job=self.report_job,
            cluster=self.cluster,
            user=self.user,
            host=self.host,
        )
        write_atomically(self.directory / "submission.json", json.dumps(asdict(document), indent=1))


@dataclass(frozen=True, kw_only=True)
class Task:
    """One point of a submission."""

    spec_id: str
    key: str  # as in QueuedJob
    job: str  # "17_3"; empty if sbatch gave no id
    submission: Submission
    log: Path
    point: Path  # the folder of its attempts
    refused: bool = False  # sbatch refused it
    attempts: list[Path] = field(default_factory=list)  # oldest first

    @property
    def frozen(self) -> Path:
        """The folder with its spec and header as they were submitted."""
        return self.submission.directory / "specs" / self.spec_id

    def found_attempts(self) -> list[Path]:
        """Its attempts that are on disk now."""
        return find_attempts(self.point, self.key, self.job)


def read_submissions(runs_dir: Path) -> tuple[list[Submission], list[str]]:
    """(every submission, oldest first; one line per damaged file)."""
    submissions, problems = [], []
    for directory in sorted((runs_dir / "slurm").glob("*")):
        if not directory.is_dir() or directory.name.startswith("."):
            continue
        found, problem = _read(directory)
        if problem:
            problems.append(problem)
        submissions.append(found)
    return submissions, problems


def _read(directory: Path) -> tuple[Submission, str]:
    path = directory / "submission.json"
    try:
        told = _DOCUMENT.validate_json(path.read_bytes())
    except FileNotFoundError:  # killed before the first sbatch, or deleted
        return Submission(directory=directory, arrays=_arrays_of_scripts(directory)), ""
    except (OSError, ValidationError) as error:
        why = str(error).splitlines()[0]
        line = f"{path}: not readable ({why}); its jobs are looked up by the scripts beside it"
        return Submission(
            directory=directory, arrays=_arrays_of_scripts(directory), is_damaged=True
        ), line
    return (
        Submission(
            directory=directory,
            arrays=told.arrays,
            report_job=told.report_job,
            cluster=told.cluster,
            user=told.user,
            host=told.host,
        ),
        "",
    )


def _arrays_of_scripts(directory: Path) -> list[SubmittedArray]:
    """The arrays of a submission, from its scripts, with ids from attempts that name them; any of
    them may be in the queue."""
    arrays = []
    for path in sorted(directory.glob(f"{directory.name}-[0-9]*.sbatch")):
        try:
            listed = _SPECS.search(path.read_text(errors="replace"))
        except OSError:
            continue
        if listed:
            arrays.append(SubmittedArray(name=path.stem, spec_ids=listed[1].split(), lost=True))
    return arrays


def tasks_of(submission: Submission, runs_dir: Path) -> Iterator[Task]:
    """The points of a submission as tasks, with their attempts."""
    for array in submission.arrays:
        for index, spec_id in enumerate(array.spec_ids):
            job = f"{array.job}_{index}" if array.job else ""
            key, point = f"{array.name}_{index}", runs_dir / spec_id
            yield Task(
                spec_id=spec_id,
                key=key,
                job=job,
                submission=submission,
                log=submission.directory / f"{array.name}-{index}.log",
                point=point,
                refused=bool(array.error) and not array.lost,
                attempts=find_attempts(point, key, job),
            )


def find_attempts(point: Path, key: str, job: str) -> list[Path]:
    """A task's attempts, oldest first; they are found by the job's id or by their key."""
    if job:
        found = [(ATTEMPT.fullmatch(path.name), path) for path in point.glob(f"slurm-{job}-*")]
        mine = [(int(name["restart"]), path) for name, path in found if name and path.is_dir()]
    else:
        paths = [path for path in point.glob("slurm-*") if slurm_of(path).get("key") == key]
        mine = [(_restart_of(path), path) for path in paths]
    return [path for _, path in sorted(mine)]


def _restart_of(attempt: Path) -> int:
    named = ATTEMPT.fullmatch(attempt.name)
    return int(named["restart"]) if named else 0


# The submissions on disk and Slurm's queue, read together.


@dataclass(kw_only=True)
class View:
    """The submissions and then the queue, read in that order: otherwise an attempt that began in
    between would seem dead."""

    runs_dir: Path
    submissions: list[Submission]
    tasks: list[Task]
    queued: dict[str, QueuedJob] = field(default_factory=dict)
    facts: ClusterFacts = field(default_factory=ClusterFacts)
    problems: list[str] = field(default_factory=list)  # one line per damaged or unwritable file

    @cached_property
    def latest(self) -> dict[str, Task]:
        """The newest task of each point, among those that Slurm accepted."""
        return {task.spec_id: task for task in self.tasks if not task.refused}

    def is_of_this_cluster(self, submission: Submission) -> bool:
        """Whether a submission went to the cluster that answers here. On another cluster its job
        ids belong to other jobs."""
        known = submission.cluster and self.facts.identity
        return not known or submission.cluster == self.facts.identity

    def sees(self, submission: Submission) -> bool:
        """Whether this cluster shows this user all jobs of a submission."""
        return self.is_of_this_cluster(submission) and submission.is_mine


def read_view(runs_dir: Path) -> View:
    """The view without asking Slurm."""
    submissions, problems = read_submissions(runs_dir)
    tasks = [task for submission in submissions for task in tasks_of(submission, runs_dir)]
    return View(runs_dir=runs_dir, submissions=submissions, tasks=tasks, problems=problems)


def look(runs_dir: Path) -> View:
    """The view with the queue; Slurm is asked only if something is not settled yet. Raises
    SlurmError if Slurm does not answer."""
    view = read_view(runs_dir)
    unsettled = [s for s in view.submissions if not _is_settled(s, view.tasks)]
    if not unsettled:
        return view
    facts = cluster_facts()
    found = [_find_lost(s) for s in view.submissions]
    view = replace(
        view,
        submissions=found,
        tasks=[task for submission in found for task in tasks_of(submission, runs_dir)],
        facts=facts,
    )
    open_names = {submission.name for submission in unsettled}
    view.queued = queued_jobs(name for s in found if s.name in open_names for name in s.job_names)
    return view


def _is_settled(submission: Submission, tasks: list[Task]) -> bool:
    """Whether every point has ended, in a way that no requeue changes."""
    mine = [task for task in tasks if task.submission is submission]
    return all(task.refused or (task.attempts and _has_final_record(task)) for task in mine)


def _has_final_record(task: Task) -> bool:
    record = record_of(task.attempts[-1])
    return record is not None and not record.interrupted


def _find_lost(submission: Submission) -> Submission:
    """Look up the ids of arrays whose sbatch did not answer, by their names, and keep them."""
    if not any(_is_lost(array.job, array.error, array.lost) for array in submission.arrays):
        return submission
    arrays = [
        replace(array, job=find_job(array.name))
        if _is_lost(array.job, array.error, array.lost)
        else array
        for array in submission.arrays
    ]
    found = replace(submission, arrays=arrays)
    if arrays != submission.arrays and not submission.is_damaged:
        with suppress(OSError):  # found again next time
            found.write()
    return found


def _is_lost(job: str, error: str, lost: bool) -> bool:
    """Whether there is neither an id nor a refusal, as when the launcher was killed during
    sbatch."""
    return not job and (lost or not error)


def record_of(attempt: Path) -> RunRecord | None:
    """The record of an attempt; None if it has none that can be read."""
    try:
        return read_record(attempt / "record.json")
    except RecordError:
        return None


# What became of submitted points, from the submissions on disk and Slurm's answers.
#
# In case of doubt, a job that may be alive counts as alive. Another process writes the record of an
# attempt only if Slurm, asked by a user who may see the job, or a long silence says that it is
# over.


_UNKNOWN = Ending("lost", "the job is gone, and Slurm does not say why", interrupted=True)


def close_ended(view: View) -> list[RunRecord]:
    """Write the record, with Slurm's reason, of every attempt whose own script can no longer do so.

    Attempts that cannot be recorded become lines of ``view.problems``.
    """
    absent = [task for task in view.tasks if not task.refused and _is_open(task, view)]
    asked = [task.job for task in absent if task.job and view.is_of_this_cluster(task.submission)]
    told = endings(asked) if asked else {}
    closed = []
    for task in absent:
        try:
            over = _over(task, view, told)
        except OSError as error:
            view.problems.append(str(error))
            continue
        for attempt in over:
            try:
                record = _close(attempt, task, told)
            except (DamagedError, OSError) as error:
                view.problems.append(str(error))
                continue
            if record is not None:
                closed.append(record)
    return closed


def _is_open(task: Task, view: View) -> bool:
    """Whether an attempt of a task, or the task itself, lacks a record and may be over."""
    job = view.queued.get(task.key)
    if not task.attempts:
        return job is None and bool(task.job)
    lacking = [attempt for attempt in task.attempts if not _is_recorded(attempt)]
    runs = job is not None and job.has_started
    return bool([a for a in lacking if not (runs and a == task.attempts[-1])])


def _over(task: Task, view: View, told: Mapping[str, list[EndedJob]]) -> list[Path]:
    """The attempts of a task that are over and have no record; for a job that ended before its
    script began, a new attempt."""
    job = view.queued.get(task.key)
    ended = bool(told.get(task.job)) and told[task.job][-1].is_over
    attempts = task.found_attempts()
    if not attempts:
        gone = job is None and ended and bool(task.job)
        vanished = job is None and bool(task.job) and view.sees(task.submission)
        return [_open_unstarted(task)] if gone or (vanished and not told.get(task.job)) else []
    over = [a for a in attempts[:-1] if not _is_recorded(a)]
    last = attempts[-1]
    if _is_recorded(last) or (job is not None and job.has_started):
        return over
    silent_for = QUIET_S if view.sees(task.submission) else SILENT_S
    requeued = job is not None
    return [*over, last] if requeued or ended or silence_s(last) > silent_for else over


def _is_recorded(attempt: Path) -> bool:
    return (attempt / "record.json").exists()


def underway(view: View) -> dict[str, QueuedJob]:
    """The points that wait or run, by spec id, without those whose job has only to leave the queue.

    Points that may run but cannot be seen from here are included; their reason says what to do.
    """
    found = {}
    for task in view.tasks:
        if task.key in view.queued:
            if not _is_over(task):
                found[task.spec_id] = view.queued[task.key]
        elif not task.refused and _may_run_unseen(task, view):
            found[task.spec_id] = _unseen(task)
    return found


def _is_over(task: Task) -> bool:
    """Whether the last attempt ended by itself: only what was interrupted is requeued."""
    record = record_of(task.attempts[-1]) if task.attempts else None
    return record is not None and not record.interrupted


def _may_run_unseen(task: Task, view: View) -> bool:
    """Whether a job that is not in the queue may be alive: because it is of another cluster or
    user, or because its script was active a moment ago."""
    attempts = task.found_attempts()
    recorded = bool(attempts) and _is_recorded(attempts[-1])
    if view.sees(task.submission):
        return bool(attempts) and not recorded and silence_s(attempts[-1]) <= QUIET_S
    if not recorded:
        return True
    record = record_of(attempts[-1])
    return record is not None and record.status == "preempted"  # it may come again


def _unseen(task: Task) -> QueuedJob:
    submission = task.submission
    name = submission.cluster.partition("@")[0] or "another cluster"
    where = f"submitted to {name} by user {submission.user} from {submission.host or 'elsewhere'}"
    way = f"unseen from here: ask there, or remove {submission.directory} if its jobs are gone"
    return QueuedJob(
        job=task.job or "?",
        key=task.key,
        state=UNSEEN,
        reason=f"{where}; {way}",
        nodes="",
        time_left="",
    )


def _open_unstarted(task: Task) -> Path:
    """Make an attempt for a job that left the queue before its script began."""
    attempt = task.point / f"slurm-{task.job}-0"
    attempt.mkdir(parents=True, exist_ok=True)
    for name in ("spec.json", "attempt.json"):
        try:
            frozen = (task.frozen / name).read_text()
        except (OSError, ValueError):  # damaged: what can be known without it is recorded
            continue
        write_atomically(attempt / name, frozen)
    slurm = {"job": task.job, "job_id": task.job, "restart": 0, "nodes": "", "log": str(task.log)}
    write_atomically(attempt / "slurm.json", json.dumps(slurm | {"key": task.key}))
    return attempt


def _close(attempt: Path, task: Task, told: Mapping[str, list[EndedJob]]) -> RunRecord | None:
    """Write the record of one attempt, with the ending of its restart of the job."""
    slurm = slurm_of(attempt)
    all_ended = [ended for ended in told.get(task.job, []) if ended.is_over]
    restart = slurm["restart"] if isinstance(slurm.get("restart"), int) else 0
    ended = all_ended[min(restart, len(all_ended) - 1)] if all_ended else None
    ending = None if is_complete(attempt) else _ending(attempt, task.log, ended)
    return close_for_another(attempt, ending, with_state(slurm, ended))


def _ending(attempt: Path, log: Path, ended: EndedJob | None) -> Ending | None:
    """Why an attempt ended whose own script could not write the record."""
    if ended is None:
        return memory_kill(attempt) or _UNKNOWN
    by_state = ending_by_state(ended)
    if by_state is None:
        return (
            memory_kill(attempt)
            or killed_script(ended)
            or first_kill(attempt)
            or killed_with_its_shell(attempt)
            or left_on_signal(attempt, ended, "")
            or before_ranks(attempt, log)
        )
    told = before_ranks(attempt, log) if by_state.status == "timeout" else None
    reason = f"{by_state.reason}, {told.reason}" if told else by_state.reason
    return memory_kill(attempt) or replace(by_state, reason=reason)


def unreported(view: View) -> Iterable[Submission]:
    """Submissions whose points are still under way and whose report job is not in the queue."""
    for submission in view.submissions:
        waiting = [
            task
            for task in view.tasks
            if task.submission is submission and task.key in view.queued and not _is_over(task)
        ]
        report_key = f"{submission.job_names[-1]}_N/A"
        if waiting and report_key not in view.queued and view.sees(submission):
            yield submission
