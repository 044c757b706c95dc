"""Disks that are full or cannot be written to, before and during a run on a real Slurm."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.slurm.conftest import TOGETHER, Suite
from tests.waiting import LIMIT_S

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(590), *TOGETHER]


@contextmanager
def mounted(place: Path, *options: str) -> Iterator[None]:
    """Something mounted on a folder; skips where that is not allowed."""
    place.mkdir(exist_ok=True)
    if subprocess.run(["mount", *options, str(place)], check=False, timeout=LIMIT_S).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(place)], check=False, timeout=LIMIT_S)


@contextmanager
def read_only(place: Path) -> Iterator[None]:
    """A folder that nothing can be written into by its name; open files go on, as on a server that
    changed what it exports."""
    with mounted(place, "--bind", str(place)):
        remount = ["mount", "-o", "remount,ro,bind", str(place)]
        subprocess.run(remount, check=True, timeout=LIMIT_S)
        yield


@contextmanager
def full(place: Path) -> Iterator[None]:
    """A disk without a byte left."""
    filler = place / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while file.write(b"\0" * 4096):
                pass
        except OSError:
            pass
    try:
        yield
    finally:
        filler.unlink()


TROUBLES = {"full": (full, "no space left"), "read-only": (read_only, "read-only file system")}


@pytest.mark.parametrize("kind", TROUBLES)
def test_a_disk_that_fails_before_and_during_a_run(suite: Suite, kind: str) -> None:
    trouble, words = TROUBLES[kind]
    with mounted(suite.runs, "-t", "tmpfs", "-o", "size=2m", "tmpfs"):
        with trouble(suite.runs):
            printed = suite.stand_in("seed=3", expect=None)
        assert words in printed.lower()
        assert "Traceback" not in printed
        suite.stand_in("seed=3")
        attempt = suite.wait_for_steps(3)
        with trouble(suite.runs):
            if kind == "read-only":  # ranks that cannot write end by themselves
                suite.cluster.run("scancel", "--signal=KILL", *suite.queue())
            suite.wait_until_idle()
            assert list(suite.status()) == [attempt.parent.name]  # says what can be said
            assert not (attempt / "record.json").exists()
        suite.wait_for_states(["failed"])
        (record,) = [r for r in suite.records() if r.slurm.get("job")]
        assert record.interrupted
        assert len(record.step_s) >= 3
        (suite.directory / "calm").touch()
        suite.stand_in("seed=3")
        suite.wait_for_states(["ok"])
