"""A rank is killed in mid-run: the record says so, nobody is left, the rest goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from benchmarks.records.record import find_records, read_record

SWEEP = [
    *("-m", "contender=zeropp", "model=gpt_tiny", "num_gpus=2", "seed=0,1", "global_batch=4"),
    *("measure.warmup_steps=0", "measure.gate=false", "measure.timeline=false"),
]


def ranks_of(runs: Path) -> dict[int, psutil.Process]:
    """Every live rank whose log lies below ``runs``, by its number."""
    found = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            logs = [Path(f.path) for f in process.open_files() if f.path.endswith(".log")]
            found |= {int(p.stem[-3:]): process for p in logs if p.is_relative_to(runs)}
    return found


def start(runs: Path, *more: str) -> subprocess.Popen[str]:
    places = [f"runs_dir={runs}", f"report_dir={runs.parent / 'report'}"]
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.run", *SWEEP, *places, *more],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for_steps(runs: Path, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if any('"step"' in path.read_text() for path in runs.rglob("rank_001.jsonl")):
            return
        time.sleep(0.1)
    pytest.fail(f"no step was timed within {seconds} s")


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Path]:
    directory = tmp_path / "runs"
    yield directory
    for process in ranks_of(directory).values():
        process.kill()


def statuses(runs: Path) -> list[str]:
    return sorted(read_record(path).status for path in find_records([runs]))


def test_kill_of_one_rank_then_resume(runs: Path) -> None:
    long = "measure.steps=3000"
    sweep = start(runs, long, "measure.timeout_s=300")
    wait_for_steps(runs, 90)
    victim = ranks_of(runs)[1]
    killed_at = time.monotonic()
    os.kill(victim.pid, signal.SIGKILL)
    while not statuses(runs):
        assert time.monotonic() - killed_at < 30, "the death was not recorded within 30 s"
        time.sleep(0.1)
    first = next(iter(map(read_record, find_records([runs]))))
    assert first.status == "failed"
    assert first.reason == "rank 1 was killed by signal 9 (SIGKILL)"
    assert len(first.step_s) > 0  # what was measured is kept
    wait_for_next(runs, first.spec_id)  # the sweep went on with the next cell
    sweep.kill()  # and now the launcher itself dies
    sweep.wait(timeout=30)
    deadline = time.monotonic() + 10
    while ranks_of(runs) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert ranks_of(runs) == {}


def wait_for_next(runs: Path, done: str) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if any(path.parts[-3] != done for path in runs.rglob("rank_000.jsonl")):
            return
        time.sleep(0.1)
    pytest.fail("the sweep did not go on")


def test_second_run_completes_only_what_is_missing(runs: Path) -> None:
    short = ("measure.steps=2",)
    sweep = start(runs, *short)
    output, _ = sweep.communicate(timeout=180)
    assert sweep.returncode == 0, output
    assert statuses(runs) == ["ok", "ok"]
    record = next(iter(find_records([runs])))
    damaged = record.read_text().replace('"status": "ok"', '"status": "failed"')
    record.write_text(damaged.replace('"interrupted": false', '"interrupted": true'))
    again = start(runs, *short)
    output, _ = again.communicate(timeout=180)
    assert again.returncode == 0, output
    assert "1 of 2 points to run" in output
    assert statuses(runs) == ["failed", "ok", "ok"]
