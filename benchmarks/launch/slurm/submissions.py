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
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from benchmarks.launch.slurm.reasons import ATTEMPT, slurm_of
from benchmarks.launch.slurm.script import report_name
from benchmarks.records.record import write_atomically

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
