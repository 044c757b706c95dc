"""Whatever is in a runs folder, status, report and submission go on, and lose nothing.

In a folder with every kind of file that the suite leaves, a file of each kind is cut off, replaced
by other content, taken away and made unreadable. Slurm is a function here; the real one is in
``tests/slurm``.
"""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.launch import attempt as attempts
from benchmarks.launch.attempt import (
    ALIVE,
    Ending,
    finish_attempt,
    freeze,
    new_header,
    write_unstarted,
)
from benchmarks.launch.options import SlurmOptions
from benchmarks.launch.points import Point
from benchmarks.launch.running import SweepProgress
from benchmarks.launch.slurm import client, submit
from benchmarks.launch.slurm.submissions import Submission, SubmittedArray, write_submission
from benchmarks.launch.slurm.submit import launch
from benchmarks.launch.sweep import launch_points
from benchmarks.launch.sweep_status import sweep_status
from benchmarks.records.environment import Code
from benchmarks.records.events import EventWriter
from benchmarks.records.record import find_records, read_record
from benchmarks.report.frame import latest_ok, load_frame
from tests.unit.toy_spec import spec_of

OPTIONS = SlurmOptions(report_dir="report")
POINTS = [Point(spec_of(num_gpus=2, seed=seed), None, "") for seed in range(4)]


def fake_slurm(*command: str, timeout_s: float = 0, more: object = None) -> str:
    """No job in the queue; accounting knows that they failed; whatever is submitted is job 99."""
    if command[:3] == ("scontrol", "show", "config"):
        return "ClusterName = here\nSlurmctldHost[0] = head\nMaxArraySize = 1001\n"
    if command[0] == "sacct" and "--jobs" in command:
        return "".join(f"7_{index}|NODE_FAIL|0:0|node7\n" for index in range(3))
    return "99\n" if command[0] == "sbatch" else ""


def attempt_of(runs: Path, point: Point, name: str, *, done: bool) -> Path:
    """An attempt of two ranks with three steps each, by a process that is dead."""
    directory = runs / point.spec.spec_id / name
    directory.mkdir(parents=True)
    freeze(point.spec, new_header(name.partition("-")[0]), directory)
    (directory / ALIVE).touch()
    os.utime(directory / ALIVE, (1e9, 1e9))
    for rank in range(2):
        events = EventWriter(directory, rank)
        for index in range(3):
            events.write("step", index=index, seconds=1.0 + index, loss=5.0)
        if done:
            events.write("done")
    return directory


@pytest.fixture
def whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One of everything: recorded, abandoned, submitted, never started, refused."""
    monkeypatch.setattr(client, "call", fake_slurm)
    monkeypatch.setattr(submit, "absence", lambda: "")  # also on a machine that has no Slurm
    monkeypatch.setattr(attempts, "launched_code", lambda: Code("abc", False, "digest"))
    runs = tmp_path / "whole"
    finish_attempt(attempt_of(runs, POINTS[0], "local-1", done=True))
    attempt_of(runs, POINTS[0], "local-2", done=False)
    ending = Ending("infeasible", "too large")
    write_unstarted(POINTS[1].spec, runs, new_header("local"), ending)
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
    made = {"report_job": "8", "cluster": "here@head", "user": os.getuid(), "host": "here"}
    write_submission(directory, Submission(arrays=arrays, **made))  # type: ignore[arg-type]
    return runs


def contents(runs: Path) -> dict[str, bytes]:
    """What must never change: everything but the suite's own bookkeeping."""
    kept = [path for path in runs.rglob("*") if path.is_file()]
    kept = [path for path in kept if path.name not in (".lock", "submission.json")]
    return {str(path.relative_to(runs)): path.read_bytes() for path in kept}


def unreadable(path: Path) -> None:
    """Root has all permissions, but a folder in the place of a file cannot be read by anybody."""
    path.unlink()
    path.mkdir()


DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "empty": lambda path: path.write_bytes(b""),
    "garbage": lambda path: path.write_bytes(bytes(range(7, 256, 3))),
    "a list": lambda path: path.write_text("[]"),
    "too deep": lambda path: path.write_text("[" * 5000),
    "gone": Path.unlink,
    "unreadable": unreadable,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_every_kind_of_file_damaged(
    whole: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    points = {point.spec.spec_id for point in POINTS}
    kinds = {}  # a file of each, whichever point, attempt and rank it is of
    for path in sorted(path for path in whole.rglob("*") if path.is_file()):
        parts = path.relative_to(whole).parts
        kind = re.sub(r"\d+", "", "/".join("point" if p in points else p for p in parts))
        kinds[kind] = path.relative_to(whole)
    assert len(kinds) > 10
    for number, name in enumerate(kinds.values()):
        runs = shutil.copytree(whole, whole.parent / str(number))
        DAMAGES[damage](runs / name)
        before = contents(runs)
        found = sweep_status(runs)
        assert {p.spec_id for p in found.points} >= {p.name for p in runs.iterdir()} - {"slurm"}
        assert all("\n" not in note and str(runs) in note for note in found.notes)
        latest_ok(load_frame([runs])[0])
        with SweepProgress(1) as progress:
            launch(POINTS, OPTIONS, runs, progress)
        after = contents(runs)
        assert [n for n in before if after.get(n) != before[n]] == [], name
        capsys.readouterr()


def test_points_of_a_damaged_submission_are_not_submitted_again(
    whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (whole / "slurm" / "sweep" / "submission.json").write_text('{"arrays": [')
    launcher = {"kind": "slurm", "report_dir": "report", "dry_run": False}
    places = {"runs_dir": str(whole), "report_dir": str(whole.parent)}
    config = {**places, "rerun": "missing", "repeats": 1, "launcher": launcher}
    assert launch_points(POINTS[1:], [config] * 3) == []
    printed = capsys.readouterr()
    assert printed.err.count("left alone") == 3
    assert f"remove {whole / 'slurm' / 'sweep'} if its jobs are gone" in printed.out


def test_a_full_disk_is_said_and_everything_goes_on_afterwards(
    whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(whole)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))  # no file can grow, as on a full disk
    try:
        found = sweep_status(whole)
        with SweepProgress(1) as progress, pytest.raises(OSError) as refused:  # noqa: PT011
            launch(POINTS, OPTIONS, whole, progress)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert found.notes  # the attempts that could not be recorded
    assert refused.value.errno == errno.EFBIG  # the sweep says it of each of these points
    assert contents(whole) == before
    assert not [path for path in whole.rglob(".*") if path.is_file()]  # no half-written file
    capsys.readouterr()
    found = sweep_status(whole)
    assert found.notes == []
    assert sum(read_record(path).step_s == [1.0, 2.0, 3.0] for path in find_records([whole])) == 4
