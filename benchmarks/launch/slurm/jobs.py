"""What became of submitted points, from the submissions on disk and Slurm's answers.

In case of doubt, a job that may be alive counts as alive. Another process writes the record of an
attempt only if Slurm, asked by a user who may see the job, or a long silence says that it is over.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from benchmarks.launch.finish import Ending, close_for_another
from benchmarks.launch.frozen import DamagedError
from benchmarks.launch.owner import QUIET_S, SILENT_S, silence_s
from benchmarks.launch.slurm.client import UNSEEN, EndedJob, QueuedJob, endings
from benchmarks.launch.slurm.reasons import (
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
from benchmarks.launch.slurm.submissions import Submission, Task
from benchmarks.launch.slurm.view import View, record_of
from benchmarks.records.record import RunRecord, write_atomically

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
