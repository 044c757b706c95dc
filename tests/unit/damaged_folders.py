"""Folders of runs with attempts and submissions, and damage to their files."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path

from benchmarks.launch.alive import ALIVE
from benchmarks.launch.attempt import (
    Ending,
    finish_attempt,
    freeze,
    new_header,
    write_unstarted,
)
from benchmarks.launch.options import SlurmOptions
from benchmarks.launch.points import Point
from benchmarks.launch.slurm.submissions import Submission, SubmittedArray, write_submission
from benchmarks.records.events import EventWriter
from tests.unit.toy_spec import spec_of

OPTIONS = SlurmOptions(report_dir="report")
POINTS = [Point(spec_of(num_gpus=2, seed=seed), None, "") for seed in range(4)]


def attempt_of(runs: Path, point: Point, name: str, *, done: bool) -> Path:
    """An attempt of two ranks with three steps each, by a process that is dead."""
    directory = runs / point.spec.spec_id / name
    directory.mkdir(parents=True)
    freeze(point.spec, new_header(name.partition("-")[0]), directory)
    (directory / ALIVE).touch()
    os.utime(directory / ALIVE, (1e9, 1e9))
    for rank in range(2):
        events = EventWriter(directory, rank)
        events.write("environment", host="node7")
        for index in range(3):
            events.write("step", index=index, seconds=1.0 + index, loss=5.0)
        if done:
            events.write("done")
    return directory


def make_folder(runs: Path) -> None:
    """One of everything: recorded, abandoned, submitted, never started, refused."""
    finish_attempt(attempt_of(runs, POINTS[0], "local-1", done=True))
    attempt_of(runs, POINTS[0], "local-2", done=False)
    header = new_header("local")
    write_unstarted(POINTS[1].spec, runs, header, Ending("infeasible", "too large"))
    for index, point in enumerate(POINTS[1:3]):
        attempt = attempt_of(runs, point, "slurm-sweep-0", done=False)
        facts = {"job": f"7_{index}", "job_id": 8 + index, "restart": 0, "nodes": "node7"}
        (attempt / "slurm.json").write_text(json.dumps(facts))
        (attempt / "srun.log").write_text("srun: error: node7: task 0: Killed\n")
    directory = runs / "slurm" / "sweep"
    for point in POINTS[1:]:
        frozen = directory / "specs" / point.spec.spec_id
        frozen.mkdir(parents=True)
        freeze(point.spec, new_header("slurm"), frozen)
    ids = [point.spec.spec_id for point in POINTS[1:]]
    (directory / "sweep-report.sbatch").write_text("#!/bin/bash\n#SBATCH --account=science\n")
    arrays = [SubmittedArray(name="sweep-0", spec_ids=ids, job="7")]
    submission = Submission(
        arrays=arrays, report_job="8", cluster="here@head", user=os.getuid(), host="here"
    )
    write_submission(directory, submission)


def cut(path: Path, chance: random.Random) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: chance.randrange(len(content) or 1)])


def empty(path: Path, chance: random.Random) -> None:
    path.write_bytes(b"")


def garbage(path: Path, chance: random.Random) -> None:
    path.write_bytes(chance.randbytes(chance.randrange(1, 400)))


def other_json(path: Path, chance: random.Random) -> None:
    path.write_text(chance.choice(["[]", "{}", "3", '"text"', "null", "[" * 5000]))


def take_away(path: Path, chance: random.Random) -> None:
    path.unlink()


def unreadable(path: Path, chance: random.Random) -> None:
    """Root has all permissions, but a folder in the place of a file cannot be read by anybody."""
    path.unlink()
    path.mkdir()


DAMAGES: list[Callable[[Path, random.Random], None]] = [
    *(cut, empty, garbage, other_json, take_away, unreadable)
]
