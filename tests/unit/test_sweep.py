"""A sweep's points by launcher, and the lock that keeps submissions into one folder apart."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from benchmarks import CHECKOUT
from benchmarks.launch import local
from benchmarks.launch import owner as folder_lock
from benchmarks.launch.owner import OWNER_FILE, SILENT_S, LockedError, only_one, this_process
from benchmarks.launch.points import Point, plan_point
from benchmarks.launch.slurm.submit import copy_checkout
from benchmarks.launch.standing import standing
from benchmarks.launch.sweep import launch_points
from benchmarks.records.events import EventWriter
from benchmarks.records.record import find_records, read_record
from benchmarks.specification.run_spec import SpecError, spec_from_mapping
from tests.unit.toy_spec import mapping


def test_equal_points_are_one_point(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    specs = [spec_from_mapping(mapping() | {"seed": seed}) for seed in (0, 1, 0)]
    points = [Point(spec, None, "no plan") for spec in specs]
    places = {"runs_dir": str(tmp_path / "runs"), "report_dir": str(tmp_path), "rerun": "missing"}
    config = places | {"launcher": {"kind": "local"}}
    launch_points(points, [config] * 3)
    assert "1 of 3 points repeat others of the sweep" in capsys.readouterr().err
    assert len(list(find_records([tmp_path / "runs"]))) == 2


def test_an_option_that_a_launcher_lacks_is_one_line(tmp_path: Path) -> None:
    point = Point(spec_from_mapping(mapping()), None, "no plan")
    config = {"runs_dir": str(tmp_path), "report_dir": str(tmp_path), "rerun": "missing"}
    with pytest.raises(SpecError, match=r"launcher\.threads=4: unknown key"):
        launch_points([point], [config | {"launcher": {"kind": "local", "threads": 4}}])


def test_a_lock_is_held_by_one_and_left_by_all(tmp_path: Path) -> None:
    said: list[str] = []
    lock = tmp_path / ".lock"
    held = pytest.raises(LockedError, match=f"held by process {os.getpid()}")
    with only_one(lock, "tests", said.append), held, only_one(lock, "tests", said.append, wait_s=0):
        raise AssertionError("two hold it")
    assert list(tmp_path.iterdir()) == []
    with only_one(lock, "tests", said.append):
        pass


def test_a_holder_beats_while_it_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those on other hosts see nothing else of it."""
    lock, beaten = tmp_path / ".lock", threading.Event()
    monkeypatch.setattr(folder_lock, "BEAT_S", 0.01)
    monkeypatch.setattr(folder_lock, "beat", lambda directory: beaten.set())
    with only_one(lock, "tests", print):
        assert beaten.wait(10)


def test_a_rename_whose_answer_was_lost_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An NFS client asks again, and the server says that there is nothing left to rename."""
    rename, lost = Path.rename, [True]

    def rename_and_lose_the_answer(path: Path, target: Path) -> Path:
        renamed = rename(path, target)
        if lost:
            lost.clear()
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))
        return renamed

    monkeypatch.setattr(Path, "rename", rename_and_lose_the_answer)
    with only_one(tmp_path / ".lock", "tests", print, wait_s=0):
        pass
    assert (lost, list(tmp_path.iterdir())) == ([], [])


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
    held = pytest.raises(LockedError, match="login2")
    with held, only_one(tmp_path / ".lock", "tests", print, wait_s=0):
        raise AssertionError("two hold it")


def test_a_lock_of_another_host_is_taken_over_when_it_is_silent(tmp_path: Path) -> None:
    lock_of_another_host(tmp_path, silent_s=SILENT_S + 60)
    with only_one(tmp_path / ".lock", "tests", print, wait_s=0):
        pass
    assert list(tmp_path.iterdir()) == []


_HOLDER = """
import sys
from pathlib import Path
from benchmarks.launch import local as processes
from benchmarks.launch import owner as folder_lock
from benchmarks.launch.owner import only_one
with only_one(Path(sys.argv[1]), "tests", print):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_holder_on_another_host_is_waited_for(tmp_path: Path) -> None:
    """Another host name and other process numbers, by namespaces of the kernel."""
    lock = tmp_path / ".lock"
    script = 'hostname login2 && exec "$@"'
    command = ("sh", "-c", script, "sh", sys.executable, "-c", _HOLDER, str(lock))
    other = subprocess.Popen(
        ["unshare", "--uts", "--pid", "--fork", "--mount-proc", "--kill-child", *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert other.stdout is not None
        if other.stdout.readline() != "held\n":
            pytest.skip(f"no other namespaces here: {other.communicate(timeout=60)[1].strip()}")
        held = pytest.raises(LockedError, match="login2")
        with held, only_one(lock, "tests", print, wait_s=0):
            raise AssertionError("two hold it")
        other.communicate("", timeout=60)
        with only_one(lock, "tests", print, wait_s=0):
            pass
    finally:
        other.kill()
        other.wait(timeout=30)


def be_rank(arguments: list[str], variables: dict[str, str]) -> None:
    """What a rank of a measured point writes."""
    directory = Path(arguments[2])
    events, deadline = EventWriter(directory, int(variables["RANK"])), time.monotonic() + 60
    while not (directory.parents[2] / "go").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    events.write("step", index=0, seconds=0.1, loss=5.0)
    events.write("done")


def start_stand_in(
    arguments: list[str], *, rank: int, variables: dict[str, str], log: Path, on_cpu: bool
) -> BaseProcess:
    """In the place of ``start_rank``, without torch."""
    process = multiprocessing.get_context("fork").Process(
        target=be_rank, args=(arguments, variables)
    )
    process.start()
    return process


def test_two_local_sweeps_at_once_run_every_point_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(local, "start_rank", start_stand_in)
    spec = spec_from_mapping(mapping() | {"num_gpus": 2})
    points = [plan_point(replace(spec, seed=seed)) for seed in range(3)]
    places = {"runs_dir": str(tmp_path / "runs"), "report_dir": str(tmp_path), "rerun": "missing"}
    configs = [places | {"launcher": {"kind": "local"}}] * 3
    fork = multiprocessing.get_context("fork")
    both = [fork.Process(target=launch_points, args=(points, configs)) for _ in range(2)]
    for sweep in both:
        sweep.start()
    said, deadline = "", time.monotonic() + 60
    while "which runs points in this folder" not in said:
        assert time.monotonic() < deadline, said
        said += capfd.readouterr().err
        time.sleep(0.02)
    (tmp_path / "go").touch()
    for sweep in both:
        sweep.join(timeout=60)
    assert [sweep.exitcode for sweep in both] == [0, 0]
    records = [read_record(path) for path in find_records([tmp_path / "runs"])]
    assert sorted(r.spec["seed"] for r in records) == [0, 1, 2]
    assert {r.status for r in records} == {"ok"}
    said += capfd.readouterr().err
    assert "0 of 3 points to run with launcher=local, 3 already recorded" in said
    assert {row.spec_id for row in standing(tmp_path / "runs").rows} == {r.spec_id for r in records}
