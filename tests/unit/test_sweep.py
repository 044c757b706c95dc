"""A sweep's points by launcher, and the lock that keeps submissions into one folder apart."""

from __future__ import annotations

import json
import os
import subprocess
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from benchmarks import CHECKOUT
from benchmarks.launch.folder_lock import LockedError, only_one
from benchmarks.launch.owner import OWNER_FILE, SILENT_S, this_process
from benchmarks.launch.points import Point
from benchmarks.launch.slurm.submit import copy_checkout
from benchmarks.launch.sweep import launch_points
from benchmarks.records.record import find_records
from benchmarks.specification.run_spec import SpecError, spec_from_mapping
from tests.unit.toy_spec import mapping


def test_equal_points_are_one_point(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    specs = [spec_from_mapping(mapping() | {"seed": seed}) for seed in (0, 1, 0)]
    points = [Point(spec, None, "no plan") for spec in specs]
    places = {"runs_dir": str(tmp_path / "runs"), "report_dir": str(tmp_path), "rerun": "missing"}
    config = places | {"launcher": {"kind": "local"}}
    launch_points(points, [config] * 3)
    assert "1 of 3 points are equal to others of the sweep" in capsys.readouterr().err
    assert len(list(find_records([tmp_path / "runs"]))) == 2


def test_an_option_that_a_launcher_lacks_is_one_line(tmp_path: Path) -> None:
    point = Point(spec_from_mapping(mapping()), None, "no plan")
    config = {"runs_dir": str(tmp_path), "report_dir": str(tmp_path), "rerun": "missing"}
    with pytest.raises(SpecError, match=r"launcher\.threads=4: unknown key"):
        launch_points([point], [config | {"launcher": {"kind": "local", "threads": 4}}])


def test_a_lock_is_held_by_one_and_left_by_all(tmp_path: Path) -> None:
    said: list[str] = []
    with only_one(tmp_path, said.append) as beat:
        beat()
        with pytest.raises(LockedError, match=f"held by process {os.getpid()}"):  # noqa: SIM117
            with only_one(tmp_path, said.append, wait_s=0):
                raise AssertionError("two hold it")
    assert list(tmp_path.iterdir()) == []
    with only_one(tmp_path, said.append):
        pass


def test_a_snapshot_is_the_checkout_at_its_commit(tmp_path: Path) -> None:
    def git(directory: Path, *arguments: str) -> str:
        command = ("git", "-C", str(directory), *arguments)
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        return done.stdout

    if not git(CHECKOUT, "rev-parse", "HEAD"):
        pytest.skip("not a git checkout")
    copy_checkout(tmp_path / "copy")
    for question in (("rev-parse", "HEAD"), ("status", "--porcelain")):
        assert git(tmp_path / "copy", *question) == git(CHECKOUT, *question)
    assert (tmp_path / "copy" / "benchmarks" / "worker" / "__main__.py").exists()


def lock_of_another_host(directory: Path, silent_s: float) -> None:
    lock = directory / ".lock"
    lock.mkdir()
    owner = replace(this_process(), host="login2", boot="other", machine="other")
    (lock / OWNER_FILE).write_text(json.dumps(asdict(owner)))
    then = time.time() - silent_s
    for path in (lock / OWNER_FILE, lock):
        os.utime(path, (then, then))


def test_a_lock_of_another_host_is_respected_while_it_speaks(tmp_path: Path) -> None:
    lock_of_another_host(tmp_path, silent_s=0)
    with pytest.raises(LockedError, match="login2"), only_one(tmp_path, print, wait_s=0):
        raise AssertionError("two hold it")


def test_a_lock_of_another_host_is_taken_over_when_it_is_silent(tmp_path: Path) -> None:
    lock_of_another_host(tmp_path, silent_s=SILENT_S + 60)
    with only_one(tmp_path, print, wait_s=0) as beat:
        beat()
    assert list(tmp_path.iterdir()) == []
