"""A rank is killed in mid-run: the record says so, nobody is left, the rest goes on. Two sweeps at
once share the points."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.launch import local
from benchmarks.launch.points import Point, plan_point
from benchmarks.launch.sweep import launch_points
from benchmarks.launch.sweep_status import sweep_status
from benchmarks.records.record import find_records, read_record
from benchmarks.report import write
from benchmarks.run import main
from benchmarks.specification.run_spec import spec_from_mapping
from tests.slurm.commands import Command
from tests.slurm.ranks import start_stand_in, use_stand_ins
from tests.unit.toy_spec import mapping
from tests.waiting import wait_until

SWEEP = [
    *("-m", "contender=zeropp", "model=gpt_tiny", "num_gpus=2", "seed=0,10", "global_batch=4"),
    *("measure.warmup_steps=0", "measure.gate=false", "measure.timeline=false"),
]

# Sweeps one after another in one interpreter, whose ranks come from one fork server: to import what
# both need would take most of these tests' time. It ends as the command does, after the last one.
SWEEPS = """
import signal, sys
from benchmarks.run import main
for line in sys.stdin:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the last sweep may have ignored it
    sys.argv = line.split()
    status = main()
    print("status", status, flush=True)
sys.exit(status)
"""


def ranks_of(runs: Path) -> dict[int, psutil.Process]:
    """Every live rank whose log lies below ``runs``, by its number."""
    found: dict[int, psutil.Process] = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            logs = [Path(f.path) for f in process.open_files() if f.path.endswith(".log")]
            found |= {int(p.stem[-3:]): process for p in logs if p.is_relative_to(runs)}
    return found


@pytest.fixture
def launcher() -> Iterator[subprocess.Popen[str]]:
    """A process of ``SWEEPS``."""
    with subprocess.Popen(
        [sys.executable, "-c", SWEEPS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        yield process
        process.kill()


def start(launcher: subprocess.Popen[str], runs: Path) -> None:
    """Let the launcher run a sweep that takes minutes, and wait until a step of it is timed."""
    places = [f"runs_dir={runs}", f"report_dir={runs.parent / 'report'}"]
    long = ["measure.steps=30000", "measure.timeout_s=3000"]
    assert launcher.stdin
    print("benchmarks.run", *SWEEP, *places, *long, file=launcher.stdin, flush=True)
    files = partial(runs.rglob, "rank_001.jsonl")
    wait_until(lambda: any('"step"' in path.read_text() for path in files()), "a step")


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Path]:
    directory = tmp_path / "runs"
    yield directory
    for process in ranks_of(directory).values():
        process.kill()


def statuses(runs: Path) -> list[str]:
    return sorted(read_record(path).status for path in find_records([runs]))


def printed_by_sweep(launcher: subprocess.Popen[str]) -> tuple[list[str], str]:
    """The lines that a sweep has printed, and the line with its status."""
    assert launcher.stdout
    lines: list[str] = []
    for line in launcher.stdout:
        if line.startswith("status "):
            return lines, line
        lines.append(line)
    pytest.fail(f"the launcher ended without a status: {lines}")


def test_two_ctrl_c_end_a_sweep_with_one_line(launcher: subprocess.Popen[str], runs: Path) -> None:
    assert launcher.stdin
    assert launcher.stdout
    # The second one while the ranks are ended, and then while the interpreter ends.
    for between_s, is_last in ((0.02, False), (0.3, True)):
        start(launcher, runs / str(between_s))
        if is_last:
            launcher.stdin.close()
        for rank in ranks_of(runs).values():
            rank.suspend()  # so that it does not end by itself
        for wait_s in (between_s, 0):
            launcher.send_signal(signal.SIGINT)
            time.sleep(wait_s)
        printed, status = printed_by_sweep(launcher)
        assert status == "status 130\n"
        assert printed[-1] == "interrupted; the same command goes on from here\n"
        assert not any("Traceback" in line for line in printed)
        wait_until(lambda: not ranks_of(runs), "the end of its ranks")  # which SIGKILL begins
    assert (launcher.wait(), launcher.stdout.read()) == (130, "")


def test_kill_of_one_rank_then_of_the_launcher(launcher: subprocess.Popen[str], runs: Path) -> None:
    start(launcher, runs)
    os.kill(ranks_of(runs)[1].pid, signal.SIGKILL)
    wait_until(lambda: statuses(runs), "the record of the death")
    first = next(iter(map(read_record, find_records([runs]))))
    assert first.status == "failed"
    assert (
        first.reason
        == "rank 1 was killed by signal 9 (SIGKILL; often the system's, for lack of memory)"
    )
    assert len(first.step_s) > 0  # what was measured is kept
    files = partial(runs.rglob, "rank_000.jsonl")
    wait_until(lambda: any(f.parts[-3] != first.spec_id for f in files()), "the next point")
    launcher.kill()  # and now the launcher itself dies
    wait_until(lambda: not ranks_of(runs), "the end of its ranks")


def test_second_run_completes_only_what_is_missing(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(local, "start_rank", start_stand_in)
    places = [f"runs_dir={runs}", f"report_dir={runs.parent / 'report'}"]
    monkeypatch.setattr(sys, "argv", ["benchmarks.run", *SWEEP, *places])
    assert main() == 0, capsys.readouterr().err
    assert statuses(runs) == ["ok", "ok"]
    record = next(iter(find_records([runs])))
    damaged = record.read_text().replace('"status": "ok"', '"status": "failed"')
    record.write_text(damaged.replace('"interrupted": false', '"interrupted": true'))
    capsys.readouterr()
    assert list(runs.parent.glob("report/throughput*"))
    monkeypatch.setattr(write, "write_report", lambda *_: None)  # one report is enough
    assert main() == 0
    assert "1 of 2 points to run" in capsys.readouterr().err
    assert statuses(runs) == ["failed", "ok", "ok"]


def test_two_local_sweeps_at_once_run_every_point_once(tmp_path: Path) -> None:
    runs, wait = tmp_path / "runs", tmp_path / "wait"
    wait.touch()
    words = ["-m", "contender=zeropp", "model=gpt_tiny", "num_gpus=2", "seed=0,10,20"]
    words += ["global_batch=4", f"runs_dir={runs}", f"report_dir={tmp_path}"]
    both = [Command("benchmarks.run", words, os.environ, use_stand_ins) for _ in range(2)]
    waits = "which runs or submits points in this folder"
    wait_until(lambda: any(waits in sweep.printed for sweep in both), "one of them to wait")
    wait.unlink()
    assert [sweep.wait() for sweep in both] == [0, 0], [sweep.printed for sweep in both]
    records = [read_record(path) for path in find_records([runs])]
    assert sorted(r.spec["seed"] for r in records) == [0, 10, 20]
    assert {r.status for r in records} == {"ok"}
    said = "0 of 3 points to run with launcher=local, 3 already recorded"
    assert sum(said in sweep.printed for sweep in both) == 1
    points = sweep_status(runs).points
    assert {point.spec_id for point in points} == {r.spec_id for r in records}


MOMENTS, SIMULATED, MEASURED = 30, 100, 8
MOST_TOUCHES = 60  # of files in the runs folder, in the life of a launcher that is killed
TOUCHES = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.utime"}  # audit events


def many_points() -> dict[str, list[Point]]:
    """The points of a sweep, by the launcher that runs them."""
    spec = spec_from_mapping(mapping() | {"num_gpus": 2})
    peak = replace(spec.cluster.device, peak_fp32_tflops=1.0)
    priced = replace(spec, cluster=replace(spec.cluster, device=peak))
    return {
        "simulate": with_seeds(plan_point(priced), range(SIMULATED)),
        "local": with_seeds(plan_point(spec), range(0, 10 * MEASURED, 10)),
    }


def with_seeds(point: Point, seeds: range) -> list[Point]:
    """Points that differ in the seed alone, for which a plan is the same."""
    return [replace(point, spec=replace(point.spec, seed=seed)) for seed in seeds]


def start_all(
    many: dict[str, list[Point]], order: list[str], runs: Path, last_touch: int | None = None
) -> int:
    """What the commands do, without the seconds that their start takes, in a process whose exit
    code is returned, negative for a signal; it kills itself right before it touches a file of the
    runs folder for the time ``last_touch``."""
    if pid := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    try:
        os.setsid()
        with (runs.parent / "output").open("a") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        if last_touch is not None:
            die_before_touch(runs, last_touch)
        config: dict[str, Any] = {"runs_dir": str(runs), "report_dir": str(runs.parent / "report")}
        config |= {"rerun": "missing", "repeats": 1}
        for kind in order:
            launch_points(many[kind], [config | {"launcher": {"kind": kind}}] * len(many[kind]))
        os._exit(0)
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(1)


def die_before_touch(runs: Path, number: int) -> None:
    """Let the interpreter's audit events end this process. The moment is then a state of the
    folder and not a time: fast and slow machines are killed at the same place.

    Opening a record does not count: at its start a sweep reads all that there are.
    """
    below, left = f"{runs}{os.sep}", number

    def count(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal left
        path = str(arguments[0]) if event in TOUCHES else ""
        if not path.startswith(below) or (event == "open" and path.endswith("record.json")):
            return
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)


def kill_then_complete(many: dict[str, list[Point]], runs: Path) -> None:
    """All lives of a sweep's launcher, each a fork of this process, which has one thread."""
    use_stand_ins()
    chance = random.Random(20)
    for _ in range(MOMENTS):
        order, moment = chance.sample(list(many), 2), chance.randint(1, MOST_TOUCHES)
        assert start_all(many, order, runs, moment) == -signal.SIGKILL
    assert start_all(many, list(many), runs) == 0


def test_a_sweep_killed_at_30_random_moments(runs: Path) -> None:
    """A moment is how often the launcher has touched the runs folder in one life. All lives
    together touch it less often than the sweep has to, so that none of them comes to its end."""
    runs.mkdir()
    many = many_points()
    spawn = multiprocessing.get_context("spawn")
    launchers = spawn.Process(target=kill_then_complete, args=(many, runs), daemon=True)
    launchers.start()
    launchers.join()
    assert launchers.exitcode == 0, (runs.parent / "output").read_text()[-2000:]
    records = [read_record(path) for path in find_records([runs])]
    successes = Counter((r.spec_id, r.provenance) for r in records if r.status == "ok")
    points = [(p.spec.spec_id, "simulated") for p in many["simulate"]]
    points += [(p.spec.spec_id, "measured") for p in many["local"]]
    assert successes == Counter(points)  # complete, and nothing twice
    assert {r.reason for r in records if r.status != "ok"} == {"the launcher was killed"}
    attempts = [path for path in runs.glob("*/local-*") if path.is_dir()]
    assert len(attempts) > MEASURED  # some were interrupted
    assert all((path / "record.json").exists() for path in attempts)  # nothing lost
    on_disk = sum(path.read_text().count('"step"') for path in runs.glob("*/*/rank_*.jsonl"))
    assert on_disk == sum(len(rank.step_s) for r in records for rank in r.ranks) > 0
    assert ranks_of(runs) == {}
    assert [point.state for point in sweep_status(runs).points] == ["ok"] * (SIMULATED + MEASURED)
