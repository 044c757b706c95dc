"""The submissions on disk and Slurm's queue, read together."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from benchmarks.launch.slurm.client import (
    ClusterFacts,
    QueuedJob,
    cluster_facts,
    find_job,
    queued_jobs,
)
from benchmarks.launch.slurm.submissions import Submission, Task, read_submissions, tasks_of
from benchmarks.records.record import RecordError, RunRecord, read_record


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
