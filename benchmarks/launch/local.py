"""Runs points one after another on this machine, with one process per rank.

Ranks are forked from a process that has already imported torch, because importing torch and
DeepSpeed takes seconds of processor time per rank: the fork server of ``multiprocessing``, once per
sweep. It must not use a device, because its forks could not use it then. So DeepSpeed, whose
import initialises CUDA, is imported in advance for CPU ranks only, and only where a point of the
sweep runs on it. Ranks are started without
torchrun, so that the record can name the rank that ended first and the signal that killed it.

No rank outlives its attempt: it leads a session of its own, and ends it when the *parent pipe*
closes. Only the launcher has the writing end of this pipe.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from benchmarks.launch.attempt import (
    Ending,
    close_abandoned,
    ending_by_events,
    exited,
    finish_attempt,
    killed,
    new_header,
    read_ranks,
    started,
)
from benchmarks.launch.options import LocalOptions
from benchmarks.launch.points import Point
from benchmarks.launch.running import Sweep, SweepProgress, check_rank, one_by_one, say
from benchmarks.launch.slurm.client import SlurmError
from benchmarks.launch.slurm.submissions import close_ended, query_slurm, read_view
from benchmarks.records.events import Events, of_kind, rank_file, read_events
from benchmarks.records.metrics import step_line
from benchmarks.records.record import RunRecord
from benchmarks.specification import SpecError
from benchmarks.specification.contenders import CONTENDERS
from benchmarks.specification.run_spec import RunSpec

# A forked process imports the launcher's main module again; what that imports is listed here, too.
# The worker's settings come before torch.
_PRELOADED = (
    "benchmarks.worker",
    "torch.distributed",
    "benchmarks.specification.compose",
    __name__,
)
# For CPU ranks only. Optimizers import dynamo in their first step.
_PRELOADED_ON_CPU = ("benchmarks.worker.__main__", "torch._dynamo")
_CONTEXT = multiprocessing.get_context("forkserver")
_POLL_S = 0.2
_GRACE_S = 5.0  # how long other ranks may go on writing events after one has failed

Processes = Mapping[int, BaseProcess]  # by rank


def preloaded_on_cpu(contenders: Iterable[str]) -> list[str]:
    """The modules that ranks of these contenders import. The fork server ignores names of modules
    that are not installed."""
    modules = dict.fromkeys(_PRELOADED_ON_CPU)
    for name in contenders:
        contender = CONTENDERS[name]
        modules |= dict.fromkeys([contender.trainer.partition(":")[0], *contender.late_imports])
    return list(modules)


def preload(points: Sequence[Point]) -> None:
    """Choose what the fork server imports when the first rank of these points starts it. One that
    runs already stays as it is: what it has not imported, ranks import themselves."""
    on_cpu = all(point.spec.cluster.device.is_cpu for point in points)
    more = preloaded_on_cpu(point.spec.contender.name for point in points) if on_cpu else ()
    _CONTEXT.set_forkserver_preload([*_PRELOADED, *more])


def start_rank(
    arguments: Sequence[str],
    *,
    rank: int,
    variables: Mapping[str, str],
    log: Path,
    parent: Connection,
) -> BaseProcess:
    """Start one rank: ``python -m benchmarks.worker`` with these arguments.

    ``variables`` are added to its environment; its output goes to ``log``; it ends when the pipe
    whose reading end is ``parent`` is closed. The first call of a process starts the fork
    server, from which all later ranks are forked, too.
    """
    process = _CONTEXT.Process(
        target=_be_rank, args=(list(arguments), dict(variables), log, parent), name=f"rank {rank}"
    )
    process.start()
    return process


def _be_rank(
    arguments: list[str], variables: dict[str, str], log: Path, parent: Connection
) -> None:
    """Run a rank in this forked process: with a session, variables and log of its own."""
    os.setsid()
    os.environ.update(variables)

    def end_with_parent() -> None:
        parent.poll(None)  # nothing is ever sent, so it returns when the other end is closed
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=end_with_parent, daemon=True).start()
    with log.open("ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)

    import torch

    from benchmarks.worker.__main__ import main

    if "OMP_NUM_THREADS" in os.environ:  # torch read it when the server imported it
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    sys.exit(main(arguments))


def _gpus() -> list[Path]:
    return [*Path("/dev").glob("nvidia[0-9]*")]


def run_attempt(
    point: Point, options: LocalOptions, runs_dir: Path, progress: SweepProgress
) -> RunRecord:
    """Make one attempt at a point and write its record, whatever happens."""
    watched, num_ranks = _Watched(point, progress, options.steps), point.spec.num_gpus
    header = new_header("local", point.plan, options.variant)
    with started(point.spec, header, runs_dir) as directory:
        try:
            ending = _run_ranks(watched, directory, share_gpu=options.share_gpu)
        except BaseException:
            ending = Ending("failed", "interrupted by the user", interrupted=True)
            finish_attempt(directory, ending, num_ranks=num_ranks)
            raise
        return finish_attempt(directory, ending, num_ranks=num_ranks)


@dataclass
class _Watched:
    """A point while it runs, and what a person sees of it."""

    point: Point
    progress: SweepProgress
    shows_steps: bool
    shown: int = 0  # steps that have been printed

    def show(self, events: Sequence[dict[str, Any]]) -> None:
        """Show where a rank is, and its steps that have not been shown."""
        self.progress.update(self.point, _stage_of(events))
        steps = of_kind(list(events), "warmup", "step")
        if self.shows_steps:
            for event in steps[self.shown :]:
                say(step_line(self.point.spec, event))
            self.shown = len(steps)


def _run_ranks(watched: _Watched, directory: Path, *, share_gpu: bool) -> Ending | None:
    """Run the ranks of a point's job at the same time, until they end or reach the time limit.

    Returns how they ended, if the ranks could not write that themselves, or None if their events
    say it.
    """
    reader, writer = _CONTEXT.Pipe(duplex=False)
    processes = _start(watched.point.spec, directory, reader, share_gpu=share_gpu)
    try:
        return _wait(watched, processes, directory)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # another Ctrl-C would leave ranks behind
        raise
    finally:
        writer.close()
        _wait_all(processes, _POLL_S)
        for process in processes.values():
            process.kill()
            process.join(timeout=30)


def _start(
    spec: RunSpec,
    directory: Path,
    reader: Connection,
    *,
    share_gpu: bool,
) -> Processes:
    common = {
        **os.environ,
        "WORLD_SIZE": str(spec.num_gpus),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
    }
    common.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // spec.num_gpus)))
    return {
        rank: start_rank(
            [str(directory / "spec.json"), "--out", str(directory)],
            rank=rank,
            variables=common
            | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            | (_SHARING | {"NCCL_HOSTID": f"rank {rank}"} if share_gpu else {}),
            log=directory / f"rank_{rank:03d}.log",
            parent=reader,
        )
        for rank in range(spec.num_gpus)
    }


# With these variables, ranks use the first GPU beside each other. NCCL refuses two ranks of one
# host on one GPU, so each poses as a host of its own (NCCL_HOSTID), and their messages go through
# sockets of this machine.
_SHARING = {
    "LOCAL_RANK": "0",
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_NET": "Socket",
    "NCCL_IB_DISABLE": "1",
    "NCCL_SOCKET_IFNAME": "lo",
    "GLOO_SOCKET_IFNAME": "lo",
}


def _wait(watched: _Watched, processes: Processes, directory: Path) -> Ending | None:
    """Wait for all ranks, for the first failure, or for the time limit."""
    limit_s = watched.point.spec.measure.timeout_s
    deadline = time.monotonic() + limit_s
    first = rank_file(directory, min(processes))
    failed_first: list[int] = []  # none if all ended at once
    while any(process.exitcode is None for process in processes.values()):
        failed_first = [r for r, process in processes.items() if _left(process, directory, r)]
        if failed_first:
            _wait_all(processes, _GRACE_S)
            break
        if time.monotonic() > deadline:
            for process in processes.values():  # who does not answer stands still
                process.terminate()
            _wait_all(processes, _GRACE_S)
            return Ending("timeout", f"not finished after measure.timeout_s={limit_s:g}")
        watched.show(read_events(first))
        time.sleep(_POLL_S)
    watched.show(read_events(first))
    codes = {rank: process.exitcode or 0 for rank, process in processes.items()}
    return _ending_by_codes(codes, failed_first, read_ranks(directory))


def _left(process: BaseProcess, directory: Path, rank: int) -> bool:
    """Whether a rank has ended, but not at the end of its work; it may leave with 0."""
    if process.exitcode == 0:
        return not of_kind(read_events(rank_file(directory, rank)), "done")
    return process.exitcode is not None


def _ending_by_codes(
    codes: Mapping[int, int], failed_first: Sequence[int], ranks: Mapping[int, Events]
) -> Ending | None:
    """How ranks ended that did not say it themselves, by their exit codes; None if all did. Errors
    of the others are consequences of what befell ``failed_first``."""
    for rank in failed_first:
        if codes[rank] >= 0 and (ending := exited(rank, codes[rank], ranks.get(rank))):
            return ending
    for rank, code in codes.items():
        # How a process ended does not matter once its rank has measured everything.
        if code < 0 and not of_kind(ranks.get(rank, []), "done"):
            return killed(rank, -code)
    if failed_first or ending_by_events(len(codes), ranks):
        return None
    endings = (exited(rank, code, ranks.get(rank)) for rank, code in codes.items())
    return next(filter(None, endings), None)


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


def _free_port() -> int:
    """A free port below those that Linux gives to outgoing connections: such a connection could
    otherwise take it before rank 0 listens."""
    while True:
        port = random.randrange(20_000, 32_000)
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


def check(points: Sequence[Point], options: LocalOptions, sweep: Sweep) -> None:
    """Raise SpecError, before any process is started, if this machine cannot run a point."""
    for point in points:
        check_rank(point)
        device, ranks, gpus = point.spec.cluster.device, point.spec.num_gpus, len(_gpus())
        if not (device.is_cpu or gpus):
            raise SpecError(
                f"cluster={point.spec.cluster.name}: launcher=local needs that GPU here and none "
                "is found (use cluster=cpu_gloo, or launcher=simulate)"
            )
        if not device.is_cpu and ranks > gpus and not options.share_gpu:
            raise SpecError(
                f"num_gpus={ranks}: this machine has {gpus} (launcher.share_gpu=true runs all "
                "ranks on one, without times that count)"
            )


def launch(
    points: Sequence[Point], options: LocalOptions, runs_dir: Path, progress: SweepProgress
) -> list[RunRecord]:
    """Run every point, also after one has failed; returns the records."""
    preload(points)
    run = partial(run_attempt, options=options, runs_dir=runs_dir, progress=progress)
    return one_by_one(points, "local", progress, run)


def settle(runs_dir: Path) -> dict[str, str]:
    """Record the attempts that are over, and return the points under way. Where Slurm does not
    answer, these are also the points that were submitted and have no record."""
    close_abandoned(runs_dir)
    try:
        view = query_slurm(runs_dir)
    except SlurmError:
        view = replace(read_view(runs_dir), is_answered=False)
    close_ended(view)
    return view.under_way()
