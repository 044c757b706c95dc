"""Whatever is in a runs folder, status, report and submission go on, name it, and lose nothing.

In a folder with every kind of file that the suite leaves, a file of each kind is cut off, emptied,
replaced by garbage, taken away and made unreadable, in half of the cases with others. Slurm is a
function here; the real one is in ``tests/slurm``.
"""

from __future__ import annotations

import errno
import os
import random
import re
import resource
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path

import pytest

from benchmarks.launch import attempt as attempts
from benchmarks.launch.running import SweepProgress
from benchmarks.launch.slurm import client, submit
from benchmarks.launch.slurm.submit import launch, settle
from benchmarks.launch.sweep import launch_points
from benchmarks.launch.sweep_status import sweep_status
from benchmarks.records.environment import Code
from benchmarks.records.events import read_events
from benchmarks.records.record import find_records, read_record
from benchmarks.report import TABLES
from benchmarks.report.frame import latest_ok, load_frame
from benchmarks.report.write import make_table
from tests.unit.damaged_folders import DAMAGES, OPTIONS, POINTS, make_folder


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
    monkeypatch.setattr(submit, "absence", lambda: "")  # also on a machine that has no Slurm
    monkeypatch.setattr(attempts, "_launched_code", lambda: Code("abc", False, "digest"))
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
    kept = [path for path in kept if path.name not in (".lock", "submission.json")]
    return {str(path.relative_to(runs)): path.read_bytes() for path in kept}


def look_at_everything(runs: Path, *, tables: bool, submit: bool) -> list[str]:
    """Status, the records of a report, and all that a submission reads; what takes long only where
    asked for: the report's tables and the submission itself. Returns the lines that status notes.
    """
    found = sweep_status(runs)
    assert {point.spec_id for point in found.points} >= {p.name for p in runs.iterdir()} - {"slurm"}
    frame, _ = load_frame([runs])
    settle(runs)
    if tables:
        for name in TABLES:
            make_table(name, latest_ok(frame))
    if submit:
        with SweepProgress(1) as progress:
            launch(POINTS, OPTIONS, runs, progress)
    return found.notes


def kind_of(path: Path, runs: Path) -> str:
    """What a file is, whichever point, attempt and rank it is of."""
    parts = path.relative_to(runs).parts
    points = {point.spec.spec_id for point in POINTS}
    return re.sub(r"\d+", "", "/".join("point" if part in points else part for part in parts))


def test_every_kind_of_file_damaged_in_every_way(
    whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    original = Original(whole)
    files = sorted(original.files)
    kinds: dict[str, list[Path]] = {}
    for path in files:
        kinds.setdefault(kind_of(path, whole), []).append(path)
    assert len(kinds) > 10
    for number, (damage, alike) in enumerate(product(DAMAGES, kinds.values())):
        chance = random.Random(number)
        original.restore()
        victims = [chance.choice(alike), *chance.sample(files, chance.choice([0, 0, 1, 5]))]
        for victim in dict.fromkeys(victims):
            damage(victim, chance)
        before, steps = contents(whole), steps_on_disk(whole)
        notes = look_at_everything(whole, tables=number % 17 == 0, submit=number % 7 == 0)
        after = contents(whole)
        lost = [name for name in before if after.get(name) != before[name]]
        assert lost == [], (number, damage.__name__, victims)
        assert steps_on_disk(whole) == steps
        assert all("\n" not in note and str(whole) in note for note in notes)
        capsys.readouterr()


def test_a_damaged_record_is_named_in_one_line(whole: Path) -> None:
    path = next(whole.glob(f"{POINTS[0].spec.spec_id}/local-1/record.json"))
    path.write_text('{"schema_version": 1, "record_id')
    notes = sweep_status(whole).notes
    assert [note for note in notes if str(path) in note] == notes
    assert len(notes) == 1


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
        found = sweep_status(whole)
        with SweepProgress(1) as progress, pytest.raises(OSError) as refused:  # noqa: PT011
            launch(POINTS, OPTIONS, whole, progress)
    (whole / "probe").unlink()
    assert probe.value.errno == errno.EFBIG
    assert found.notes  # the attempts that could not be recorded
    assert refused.value.errno == errno.EFBIG  # the sweep says it of each of these points
    assert contents(whole) == before
    assert not [path for path in whole.rglob(".*") if path.is_file()]  # no half-written file
    capsys.readouterr()
    found = sweep_status(whole)
    assert found.notes == []
    assert sum(read_record(path).step_s == [1.0, 2.0, 3.0] for path in find_records([whole])) == 4
