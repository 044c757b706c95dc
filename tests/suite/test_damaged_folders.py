"""Whatever is in a runs folder, status, report and submission go on, name it, and lose nothing.

A folder with every kind of file that the suite leaves is damaged in 500 ways: each file cut off,
emptied, replaced by garbage, taken away or made unreadable. Slurm is a function here; the real one
is in ``tests/slurm``.
"""

from __future__ import annotations

import errno
import json
import os
import random
import resource
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from benchmarks.launch import points
from benchmarks.launch.finish import finish_attempt
from benchmarks.launch.local import close_abandoned
from benchmarks.launch.owner import OWNER_FILE, this_process
from benchmarks.launch.points import Point, freeze, write_unstarted
from benchmarks.launch.progress import SweepProgress
from benchmarks.launch.slurm import client
from benchmarks.launch.slurm.jobs import unreported
from benchmarks.launch.slurm.launcher import launch
from benchmarks.launch.slurm.options import SlurmOptions
from benchmarks.launch.slurm.submissions import Submission, SubmittedArray
from benchmarks.launch.slurm.view import look
from benchmarks.records.environment import Code
from benchmarks.records.rank_events import EventWriter, read_events
from benchmarks.records.record import find_records, read_record
from benchmarks.report.frame import latest_ok, load_frame
from benchmarks.report.tables import comparison_tables
from benchmarks.status import standing
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


def fake_slurm(
    *command: str, timeout_s: float = 0, more: object = None, running: bool = False
) -> str:
    """No job in the queue; accounting knows that they failed; whatever is submitted is job 99."""
    if command[:3] == ("scontrol", "show", "config"):
        return "ClusterName = here\nSlurmctldHost[0] = head\nMaxArraySize = 1001\n"
    if command[0] == "sacct" and "--jobs" in command:
        return "".join(f"7_{index}|NODE_FAIL|0:0|node7\n" for index in range(3))
    if command[0] == "sbatch":
        return "99\n"
    return ""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory if there is one, because these tests write ten thousand files."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory, prefix="damaged-") as made:
        yield Path(made)


@pytest.fixture
def whole(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(client, "call", fake_slurm)
    monkeypatch.setattr(points, "read_code", lambda: Code("abc", False, "digest"))
    runs = folder / "whole"
    make_folder(runs)
    return runs


class Original:
    """A folder as it was made, and what brings it back after it was damaged and looked at: that is
    faster than a copy for each damage."""

    def __init__(self, runs: Path) -> None:
        self.runs = runs
        self.files = {path: path.read_bytes() for path in runs.rglob("*") if path.is_file()}
        self._times = {path: path.stat().st_mtime for path in (runs, *runs.rglob("*"))}

    def restore(self) -> None:
        """Every file with its content, no other file, and the times of all as they were."""
        for path in sorted(self.runs.rglob("*"), reverse=True):  # what is deeper comes first
            if path.is_dir() and (path in self.files or path not in self._times):
                shutil.rmtree(path)
            elif path.is_file() and path not in self.files:
                path.unlink()
        for path, content in self.files.items():
            if not path.exists() or path.read_bytes() != content:
                path.write_bytes(content)
        for path, then in self._times.items():
            os.utime(path, (then, then))


def steps_on_disk(runs: Path) -> int:
    files = runs.glob("*/*/rank_*.jsonl")
    return sum(event["event"] == "step" for file in files for event in read_events(file))


def contents(runs: Path) -> dict[str, bytes]:
    """What must never change: everything but the suite's own bookkeeping."""
    kept = [path for path in runs.rglob("*") if path.is_file()]
    kept = [path for path in kept if path.name not in (OWNER_FILE, "submission.json")]
    return {str(path.relative_to(runs)): path.read_bytes() for path in kept}


def look_at_everything(runs: Path, *, tables: bool, submit: bool) -> list[str]:
    """Status, the records of a report, and all that a submission reads; what takes long only where
    asked for: the report's tables and the submission itself. Returns the lines that status notes.
    """
    found = standing(runs)
    assert {row.spec_id for row in found.rows} >= {p.name for p in runs.iterdir()} - {"slurm"}
    frame, _ = load_frame([runs])
    list(unreported(look(runs)))
    if tables:
        comparison_tables(latest_ok(frame))
    if submit:
        with SweepProgress(1) as progress:
            launch(POINTS, OPTIONS, runs, progress)
    return found.notes


@pytest.mark.timeout(900)
def test_500_damaged_folders(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    original = Original(whole)
    files = sorted(original.files)
    assert len(files) > 20
    seen: set[tuple[Path, str]] = set()
    for number in range(NUMBER):
        chance = random.Random(number)
        original.restore()
        victims = [files[number % len(files)]]
        victims += chance.sample(files, chance.choice([0, 0, 1, 5]))
        damage = DAMAGES[number // len(files) % len(DAMAGES)]
        for victim in dict.fromkeys(victims):
            damage(victim, chance)
            seen.add((victim, damage.__name__))
        before, steps = contents(whole), steps_on_disk(whole)
        notes = look_at_everything(whole, tables=number % 49 == 0, submit=number % 7 == 0)
        after = contents(whole)
        lost = [name for name in before if after.get(name) != before[name]]
        assert lost == [], (number, damage.__name__, victims)
        assert steps_on_disk(whole) == steps
        assert all("\n" not in note and str(whole) in note for note in notes)
        capsys.readouterr()
    assert {path for path, _ in seen} == set(files)
    assert {name for _, name in seen} == {damage.__name__ for damage in DAMAGES}


def test_a_damaged_record_is_named_in_one_line(whole: Path) -> None:
    path = next(whole.glob(f"{POINTS[0].spec.spec_id}/local-1/record.json"))
    path.write_text('{"schema_version": 1, "record_id')
    notes = standing(whole).notes
    assert [note for note in notes if str(path) in note] == notes
    assert len(notes) == 1


def test_what_was_measured_survives_the_loss_of_spec_and_header(whole: Path) -> None:
    attempt = whole / POINTS[0].spec.spec_id / "local-2"
    (attempt / "spec.json").unlink()
    (attempt / "attempt.json").write_text("")
    assert close_abandoned(whole) == []
    record = read_record(attempt / "record.json")
    assert record.step_s == [1.0, 2.0, 3.0]
    assert record.spec["num_gpus"] == 2  # from the other attempt of the same point
    assert record.git_sha == "unknown"
    assert "attempt.json: not readable" in record.notes[0]


def test_jobs_of_a_damaged_submission_are_not_submitted_again(
    whole: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (whole / "slurm" / "sweep" / "submission.json").write_text('{"arrays": [')

    def still_running(*command: str, timeout_s: float = 0, more: object = None) -> str:
        if command[0] == "squeue" and "--array" in command:
            rows = (f"7_{index}|sweep-0_{index}|RUNNING|None|node7|9:00\n" for index in range(3))
            return "".join(rows)
        assert command[0] != "sbatch" or "report" in command[-1], command
        return fake_slurm(*command)

    monkeypatch.setattr(client, "call", still_running)
    with SweepProgress(1) as progress:
        assert launch(POINTS[1:], OPTIONS, whole, progress) == []
    assert capsys.readouterr().out.count("left alone") == 3


@contextmanager
def full_disk() -> Iterator[None]:
    """No file of this process can grow, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_said_and_everything_goes_on_afterwards(
    whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(whole)
    with full_disk():
        with pytest.raises(OSError) as probe:  # noqa: PT011
            (whole / "probe").write_text("x")
        found = standing(whole)
        with SweepProgress(1) as progress:
            records = launch(POINTS, OPTIONS, whole, progress)
    (whole / "probe").unlink()
    assert probe.value.errno == errno.EFBIG
    assert found.notes  # the attempts that could not be recorded
    assert [(r.status, r.interrupted) for r in records] == [("failed", True)] * len(POINTS)
    assert all("not recorded: " in record.reason for record in records)
    assert contents(whole) == before
    assert not [path for path in whole.rglob(".*") if path.is_file()]  # no half-written file
    capsys.readouterr()
    found = standing(whole)
    assert found.notes == []
    assert sum(read_record(path).step_s == [1.0, 2.0, 3.0] for path in find_records([whole])) == 4
