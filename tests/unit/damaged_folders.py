"""Folders of runs with attempts and submissions, and damage to their files."""

from __future__ import annotations

import json
import os
import random
import subprocess
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks.launch.finish import finish_attempt
from benchmarks.launch.owner import OWNER_FILE, this_process
from benchmarks.launch.points import Point, freeze, write_unstarted
from benchmarks.launch.slurm.options import SlurmOptions
from benchmarks.launch.slurm.submissions import Submission, SubmittedArray
from benchmarks.records.events import EventWriter
from tests.unit.toy_spec import spec_of

NUMBER = 500
OPTIONS = SlurmOptions(kind="slurm", report_dir="report")
POINTS = [Point(spec_of(num_gpus=2, seed=seed), None, "") for seed in range(4)]


def attempt_of(runs: Path, point: Point, name: str, *, done: bool, old_s: float = 0.0) -> Path:
    """An attempt of two ranks with three steps each, by a process that is dead."""
    directory = runs / point.spec.spec_id / name
    directory.mkdir(parents=True)
    freeze(point, directory, name.partition("-")[0])
    for rank in range(2):
        events = EventWriter(directory, rank)
        events.write("environment", host="node7")
        for index in range(3):
            events.write("step", index=index, seconds=1.0 + index, loss=5.0)
        if done:
            events.write("done")
    then = os.stat(directory).st_mtime - old_s
    for path in (*directory.glob("*"), directory):
        os.utime(path, (then, then))
    return directory


def dead_owner() -> str:
    process = subprocess.Popen(["true"])
    process.wait(timeout=10)
    return json.dumps(asdict(replace(this_process(), pid=process.pid)))


def make_folder(runs: Path) -> None:
    """One of everything: recorded, abandoned, submitted, never started, refused."""
    owner = dead_owner()
    finish_attempt(attempt_of(runs, POINTS[0], "local-1", done=True))
    abandoned = attempt_of(runs, POINTS[0], "local-2", done=False)
    (abandoned / OWNER_FILE).write_text(owner)
    write_unstarted(POINTS[1], runs, launcher="local", status="infeasible", reason="too large")
    for index, point in enumerate(POINTS[1:3]):
        attempt = attempt_of(runs, point, f"slurm-7_{index}-0", done=False, old_s=1000)
        facts = {"job": f"7_{index}", "job_id": 8 + index, "restart": 0, "nodes": "node7"}
        (attempt / "slurm.json").write_text(json.dumps(facts | {"key": f"sweep-0_{index}"}))
        (attempt / "srun.log").write_text("srun: error: node7: task 0: Killed\n")
        (attempt / "rank_000.exit").write_text("0")
        os.utime(attempt, (1e9, 1e9))
        for path in attempt.glob("*"):
            os.utime(path, (1e9, 1e9))
    directory = runs / "slurm" / "sweep"
    for point in POINTS[1:]:
        frozen = directory / "specs" / point.spec.spec_id
        frozen.mkdir(parents=True)
        freeze(point, frozen, "slurm")
    ids = [point.spec.spec_id for point in POINTS[1:]]
    listed = "".join(f"    {spec_id}\n" for spec_id in ids)
    (directory / "sweep-0.sbatch").write_text(f"#!/bin/bash\nspecs=(\n{listed})\n")
    (directory / "sweep-report.sbatch").write_text("#!/bin/bash\n#SBATCH --account=science\n")
    Submission(
        directory=directory,
        arrays=[SubmittedArray(name="sweep-0", spec_ids=ids, job="7")],
        report_job="8",
        cluster="here@head",
        user=0,
    ).write()


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
