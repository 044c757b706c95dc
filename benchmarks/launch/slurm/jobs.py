"""What became of submitted points: submissions on disk against what Slurm says now.

A submission is a folder ``RUNS_DIR/slurm/<sweep>/`` with the scripts, their logs, the frozen
specs, and ``submission.json``, written before the first sbatch: a job whose id never arrived is
still found by its name.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.launch.finish import Ending, finish_attempt
from benchmarks.launch.slurm.attempt import ending_by_state, is_complete, memory_kill, slurm_of
from benchmarks.launch.slurm.client import QueuedJob, endings, queued_jobs
from benchmarks.records.record import RunRecord, read_record, write_atomically

_UNKNOWN = Ending("lost", "the job ended, and nobody knows why (no accounting)", interrupted=True)


@dataclass(frozen=True)
class SubmittedArray:
    """An array as ``submission.json`` keeps it. ``job`` is empty until sbatch answered."""

    name: str
    spec_ids: list[str]
    job: str = ""
    error: str = ""


@dataclass(frozen=True)
class Submission:
    """Everything that one call of the launcher submitted."""

    directory: Path
    arrays: list[SubmittedArray]
    report_job: str = ""

    def write(self) -> None:
        """Write ``submission.json``."""
        document = {"arrays": [asdict(a) for a in self.arrays], "report_job": self.report_job}
        write_atomically(self.directory / "submission.json", json.dumps(document, indent=1))


@dataclass(frozen=True)
class Task:
    """One point of a submission."""

    spec_id: str
    key: str  # as in QueuedJob
    job: str  # "17_3"; empty where sbatch gave no id
    frozen: Path
    log: Path
    attempts: list[Path] = field(default_factory=list)  # oldest first


def read_tasks(runs_dir: Path) -> list[Task]:
    """Every point of every submission, oldest first."""
    found = sorted(runs_dir.glob("slurm/*/submission.json"))
    return [task for path in found for task in _tasks_of(path, runs_dir)]


def close_ended(
    tasks: list[Task], queued: Mapping[str, QueuedJob], runs_dir: Path
) -> list[RunRecord]:
    """Record every attempt that can no longer record itself, with Slurm's reason.

    ``tasks`` must have been read before ``queued``: an attempt that began in between would look
    dead otherwise.
    """
    closed = []
    for task in tasks:
        job = queued.get(task.key)
        if task.job and job is None and not task.attempts:
            _open_unstarted(task, runs_dir)
        for attempt in task.attempts:
            is_last = attempt == task.attempts[-1]
            may_live = job is not None and job.has_started and is_last
            if not may_live and not (attempt / "record.json").exists():
                closed.append(_close(attempt))
    return closed


def underway(tasks: list[Task], queued: Mapping[str, QueuedJob]) -> dict[str, QueuedJob]:
    """The points that wait or run, by spec id; not those whose job only has to leave the queue."""
    return {
        task.spec_id: queued[task.key]
        for task in tasks
        if task.key in queued and not _is_over(task)
    }


def _is_over(task: Task) -> bool:
    """Whether the last attempt ended by itself: only what was interrupted is requeued."""
    path = task.attempts[-1] / "record.json" if task.attempts else None
    return path is not None and path.exists() and not read_record(path).interrupted


def look(runs_dir: Path) -> tuple[list[Task], dict[str, QueuedJob]]:
    """Submissions, then the queue, in that order; asks Slurm only where something was submitted."""
    tasks = read_tasks(runs_dir)
    return tasks, queued_jobs() if tasks else {}


def _tasks_of(path: Path, runs_dir: Path) -> Iterator[Task]:
    for array in json.loads(path.read_text())["arrays"]:
        for index, spec_id in enumerate(array["spec_ids"]):
            job = f"{array['job']}_{index}" if array["job"] else ""
            attempts = (runs_dir / spec_id).glob(f"slurm-{job}-*") if job else ()
            yield Task(
                spec_id=spec_id,
                key=f"{array['name']}_{index}",
                job=job,
                frozen=path.parent / "specs" / spec_id,
                log=path.parent / f"{array['name']}-{index}.log",
                attempts=sorted(attempts, key=_restart_of),
            )


def _restart_of(attempt: Path) -> int:
    return int(attempt.name.rpartition("-")[2])


def _open_unstarted(task: Task, runs_dir: Path) -> None:
    """An attempt for a job that left the queue without having run a line of its script."""
    attempt = runs_dir / task.spec_id / f"slurm-{task.job}-0"
    attempt.mkdir(parents=True)
    for name in ("spec.json", "attempt.json"):
        shutil.copy(task.frozen / name, attempt / name)
    slurm = {"job": task.job, "job_id": task.job, "restart": 0, "nodes": "", "log": str(task.log)}
    write_atomically(attempt / "slurm.json", json.dumps(slurm))
    task.attempts.append(attempt)


def _close(attempt: Path) -> RunRecord:
    slurm = slurm_of(attempt)
    ended = endings(str(slurm["job"]))
    restart = min(_restart_of(attempt), len(ended) - 1)
    explained = ending_by_state(ended[restart]) if ended else _UNKNOWN
    ending = None if is_complete(attempt) else memory_kill(attempt) or explained
    state = ended[restart].state if ended else ""
    return finish_attempt(attempt, ending=ending, slurm=slurm | {"state": state})
