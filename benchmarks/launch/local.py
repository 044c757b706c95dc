"""Run points one after another on this machine, a process a rank.

Ranks are started directly and not through torchrun, so that the record can name the rank and the
signal that ended it. Each rank is its own process group; whatever happens, none is left behind.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.events import rank_file, read_events
from benchmarks.launch.finish import Ending, finish_attempt, killed
from benchmarks.launch.points import Point, attempt_directory, freeze
from benchmarks.progress import SweepProgress
from benchmarks.record import RunRecord
from benchmarks.spec import RunSpec, SpecError

_POLL_S = 0.2
_GRACE_S = 5.0  # for the other ranks to say what they saw, once one has ended badly

Process = subprocess.Popen[bytes]


def check(points: Sequence[Point], options: dict[str, Any]) -> None:
    """Refuse what this machine cannot run; raises SpecError before any process is started."""
    del options
    for point in points:
        cluster = point.spec.cluster
        if cluster.device.name != "cpu" and not Path("/dev/nvidia0").exists():
            raise SpecError(
                f"cluster={cluster.name}: launcher=local needs that GPU here and none is found "
                "(use cluster=cpu_gloo, or launcher=simulate)"
            )


def launch(
    points: Sequence[Point], options: dict[str, Any], runs_dir: Path, progress: SweepProgress
) -> list[RunRecord]:
    """Run every point; a point that fails does not stop the next."""
    del options
    close_abandoned(runs_dir)
    records = []
    for point in points:
        records.append(_run_point(point, runs_dir, progress))
        progress.finished(records[-1])
    return records


def close_abandoned(runs_dir: Path) -> None:
    """Finish attempts whose launcher was killed: their event files still hold what was measured."""
    for header in runs_dir.glob("*/local-*/attempt.json"):
        directory = header.parent
        owner = directory / "launcher.pid"
        if (directory / "record.json").exists() or _is_alive(owner):
            continue
        try:
            finish_attempt(directory, ending=_outside("the launcher was killed"))
        except SpecError:  # of another version of the suite; it must not stand in the way
            continue


def _outside(reason: str) -> Ending:
    return Ending("failed", reason, interrupted=True)


def _run_point(point: Point, runs_dir: Path, progress: SweepProgress) -> RunRecord:
    directory = attempt_directory(point.spec, runs_dir, "local")
    freeze(point, directory, "local")
    (directory / "launcher.pid").write_text(str(os.getpid()))
    processes = _start_ranks(point.spec, directory)
    try:
        ending = _wait(point, processes, directory, progress)
    except BaseException:
        _kill(processes)
        finish_attempt(directory, ending=_outside("interrupted by the user"))
        raise
    _kill(processes)
    return finish_attempt(directory, ending=ending)


def _start_ranks(spec: RunSpec, directory: Path) -> list[Process]:
    common = os.environ | {
        "WORLD_SIZE": str(spec.num_gpus),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "SUITE_LAUNCHER_PID": str(os.getpid()),
    }
    common.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // spec.num_gpus)))
    command = [sys.executable, "-m", "benchmarks.worker", str(directory / "spec.json")]
    processes = []
    for rank in range(spec.num_gpus):
        with (directory / f"rank_{rank:03d}.log").open("wb") as log:
            process = subprocess.Popen(
                [*command, "--out", str(directory)],
                env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        processes.append(process)
    return processes


def _wait(
    point: Point,
    processes: Sequence[Process],
    directory: Path,
    progress: SweepProgress,
) -> Ending | None:
    """Wait for all ranks, for the first bad end, or for the time limit."""
    limit_s = point.spec.measure.timeout_s
    deadline = time.monotonic() + limit_s
    while any(process.poll() is None for process in processes):
        for rank, process in enumerate(processes):
            if (process.returncode or 0) < 0 and not _has_finished(directory, rank):
                _wait_all(processes, _GRACE_S)
                return killed(rank, -process.returncode)
        if any(process.returncode for process in processes):
            _wait_all(processes, _GRACE_S)
            break
        if time.monotonic() > deadline:
            return Ending("timeout", f"not finished after measure.timeout_s={limit_s:g}")
        progress.update(point, _stage_of(directory))
        time.sleep(_POLL_S)
    for rank, process in enumerate(processes):
        if (process.returncode or 0) < 0 and not _has_finished(directory, rank):
            return killed(rank, -process.returncode)
    return None


def _has_finished(directory: Path, rank: int) -> bool:
    """The rank measured everything; how its process then went down changes nothing."""
    events = read_events(rank_file(directory, rank))
    return bool(events) and events[-1]["event"] == "done"


def _stage_of(directory: Path) -> str:
    """What rank 0 did last, for the progress line."""
    events = read_events(rank_file(directory, 0))
    if not events:
        return "starting ranks"
    last = events[-1]
    if "index" in last:
        return f"{last['event']} {last['index']}: loss {last['loss']:.4f}, {last['seconds']:.2f} s"
    words = {
        "environment": "checking against one process",
        "gate": "building",
        "counters": "recording a step",
    }
    return words.get(last["event"], str(last["event"]))


def _wait_all(processes: Sequence[Process], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while any(p.poll() is None for p in processes) and time.monotonic() < deadline:
        time.sleep(_POLL_S)


def _kill(processes: Sequence[Process]) -> None:
    for process in processes:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    for process in processes:
        process.wait(timeout=30)


def _is_alive(pid_file: Path) -> bool:
    try:
        os.kill(int(pid_file.read_text()), 0)
    except (OSError, ValueError):
        return False
    return True


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
