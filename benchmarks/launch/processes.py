"""Runs ranks as processes of this machine, and makes sure that none of them is left running.

Ranks are started directly and not through torchrun, so that the record can name the rank that ended
first and the signal that killed it. Each rank has a process group of its own, which is killed at
the end in any case.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from benchmarks.launch.finish import Ending, finish_attempt, killed
from benchmarks.launch.owner import beat, state_and_start
from benchmarks.launch.points import Point, attempt_directory, freeze
from benchmarks.launch.rank_process import start_rank
from benchmarks.launch.sweep_progress import SweepProgress, say
from benchmarks.records.rank_events import rank_file, read_events
from benchmarks.records.record import RunRecord
from benchmarks.records.recorded_spec import read_spec
from benchmarks.records.step_line import step_line
from benchmarks.specification.run_spec import RunSpec
from zeropp.cluster import Device

_POLL_S = 0.2
_GRACE_S = 5.0  # how long other ranks may go on writing events after one has failed

Processes = Mapping[int, BaseProcess]  # by rank


def is_here(device: Device) -> bool:
    """Whether this machine has a device of that kind: a CPU or a GPU."""
    return device.is_cpu or any(Path("/dev").glob("nvidia[0-9]*"))


def run_attempt(
    point: Point,
    *,
    launcher: str,
    worlds: Sequence[Sequence[int]],
    runs_dir: Path,
    progress: SweepProgress,
    variant: str = "",
    arguments: Sequence[str] = (),
    shows_steps: bool = False,
) -> RunRecord:
    """Make one attempt at a point and write its record, whatever happens.

    ``worlds``: ranks that run at the same time, one such set after the other; ``variant``: see
    ``RunRecord``; ``arguments`` are the worker's own; ``shows_steps``: print a line per step.
    """
    watched = _Watched(point, progress, shows_steps)
    directory = attempt_directory(point.spec, runs_dir, launcher)
    freeze(point, directory, launcher, variant)
    num_ranks = sum(map(len, worlds))
    try:
        for ranks in worlds:
            ending = _run_ranks(watched, directory, ranks, arguments)
            if ending is not None:
                break
    except BaseException:
        ending = Ending("failed", "interrupted by the user", interrupted=True)
        finish_attempt(directory, ending=ending, num_ranks=num_ranks)
        raise
    return finish_attempt(directory, ending=ending, num_ranks=num_ranks)


@dataclass
class _Watched:
    """A point while it runs, and what a person sees of it."""

    point: Point
    progress: SweepProgress
    shows_steps: bool
    shown: int = 0  # steps that have been printed

    def tell(self, events: Sequence[dict[str, Any]]) -> None:
        """Show where a rank is, and its steps that have not been shown."""
        self.progress.update(self.point, _stage_of(events))
        steps = [event for event in events if event["event"] in ("warmup", "step")]
        if self.shows_steps:
            recorded = read_spec(self.point.spec.to_dict())
            for event in steps[self.shown :]:
                say(step_line(recorded, event))
            self.shown = len(steps)


def _run_ranks(
    watched: _Watched, directory: Path, ranks: Sequence[int], arguments: Sequence[str]
) -> Ending | None:
    """Run some ranks of a point's job at the same time, until they end or reach the time limit.

    Returns how they ended, if the ranks could not write that themselves, or None if their events
    say it.
    """
    processes = _start(watched.point.spec, directory, ranks, arguments)
    starts = {p.pid: state_and_start(p.pid)[1] for p in processes.values() if p.pid is not None}
    try:
        return _wait(watched, processes, directory)
    finally:
        for process in processes.values():
            process.kill()
        for pid, started in starts.items():
            kill_session(pid, started)
        for process in processes.values():
            process.join(timeout=30)


def _start(
    spec: RunSpec, directory: Path, ranks: Sequence[int], arguments: Sequence[str]
) -> Processes:
    common = {
        **os.environ,
        "WORLD_SIZE": str(spec.num_gpus),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
    }
    common.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // len(ranks))))
    return {
        rank: start_rank(
            [str(directory / "spec.json"), "--out", str(directory), *arguments],
            rank=rank,
            variables=common | {"RANK": str(rank), "LOCAL_RANK": str(place)},
            log=directory / f"rank_{rank:03d}.log",
            on_cpu=spec.cluster.device.is_cpu,
        )
        for place, rank in enumerate(ranks)
    }


def _wait(watched: _Watched, processes: Processes, directory: Path) -> Ending | None:
    """Wait for all ranks, for the first failure, or for the time limit."""
    limit_s = watched.point.spec.measure.timeout_s
    deadline = time.monotonic() + limit_s
    while any(process.exitcode is None for process in processes.values()):
        if any(process.exitcode for process in processes.values()):
            _wait_all(processes, _GRACE_S)
            break
        if time.monotonic() > deadline:
            return Ending("timeout", f"not finished after measure.timeout_s={limit_s:g}")
        watched.tell(read_events(rank_file(directory, min(processes))))
        beat(directory)
        time.sleep(_POLL_S)
    watched.tell(read_events(rank_file(directory, min(processes))))
    for rank, process in processes.items():
        exitcode = process.exitcode or 0
        if exitcode < 0 and not _has_finished(directory, rank):
            return killed(rank, -exitcode)
    return None


def _has_finished(directory: Path, rank: int) -> bool:
    """Whether the rank measured everything; then it does not matter how its process ended."""
    events = read_events(rank_file(directory, rank))
    return bool(events) and events[-1]["event"] == "done"


def _stage_of(events: Sequence[dict[str, Any]]) -> str:
    """The last thing that a rank did, for the progress line."""
    if not events:
        return "starting ranks"
    last = events[-1]
    if "index" in last:
        loss = f"loss {last['loss']:.4f}, " if "loss" in last else ""
        return f"{last['event']} {last['index']}: {loss}{last['seconds']:.2f} s"
    words = {
        "environment": "checking against one process",
        "gate": "building",
        "counters": "recording a step",
    }
    return words.get(last["event"], str(last["event"]))


def _wait_all(processes: Processes, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while any(p.exitcode is None for p in processes.values()) and time.monotonic() < deadline:
        time.sleep(_POLL_S)


def kill_session(pid: int, started: str) -> None:
    """Kill what is left of the session that a rank led: the rank and its children.

    ``started`` is the rank's start time (``owner.state_and_start``). If the rank has ended long
    ago, another process may have got its number; that one is left alone. If no process has the
    number, the group is the rank's: the kernel does not reuse a number while a group has it.
    """
    _, found = state_and_start(pid)
    if found in ("", started):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
