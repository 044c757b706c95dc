"""Starts ranks by forking a process that has already imported torch.

Importing torch and DeepSpeed takes seconds of processor time per rank. The fork server of
``multiprocessing`` imports them once per sweep. It must not use a device, because its forks could
not use it then. So DeepSpeed, whose import initialises CUDA, is imported in advance for CPU ranks
only.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

from benchmarks.specification.contenders import CONTENDERS

# A forked process imports the launcher's main module again; what that imports is listed here, too.
_PRELOADED = ("torch.distributed", "benchmarks.specification.compose", "benchmarks.launch.sweep")
# For CPU ranks only: what every contender needs. Optimizers import dynamo in their first step. The
# fork server ignores names of modules that are not installed.
PRELOADED_ON_CPU = (
    "benchmarks.worker.__main__",
    "torch._dynamo",
    *(contender.trainer.partition(":")[0] for contender in CONTENDERS.values()),
    *(name for contender in CONTENDERS.values() for name in contender.late_imports),
)
_CONTEXT = multiprocessing.get_context("forkserver")


def start_rank(
    arguments: Sequence[str], *, rank: int, variables: Mapping[str, str], log: Path, on_cpu: bool
) -> BaseProcess:
    """Start one rank: ``python -m benchmarks.worker`` with these arguments.

    ``variables`` are added to its environment; its output goes to ``log``. The first call of a
    process starts the fork server, from which all later ranks are forked, too.
    """
    _CONTEXT.set_forkserver_preload([*_PRELOADED, *(PRELOADED_ON_CPU if on_cpu else ())])
    life, _ = _line_of_life()
    process = _CONTEXT.Process(
        target=_be_rank, args=(list(arguments), dict(variables), log, life), name=f"rank {rank}"
    )
    process.start()
    return process


@cache
def _line_of_life() -> tuple[Connection, Connection]:
    """A pipe whose writing end only this process has: ranks see it closed when the process ends."""
    return _CONTEXT.Pipe(duplex=False)


def _be_rank(arguments: list[str], variables: dict[str, str], log: Path, life: Connection) -> None:
    """Run a rank in this forked process: with a session, variables and log of its own."""
    os.setsid()
    os.environ.update(variables)
    threading.Thread(target=_leave_with_launcher, args=(life,), daemon=True).start()
    with log.open("ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)

    import torch

    from benchmarks.worker.__main__ import main

    if "OMP_NUM_THREADS" in os.environ:  # torch read it when the server imported it
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    sys.exit(main(arguments))


def _leave_with_launcher(life: Connection) -> None:
    """Wait until the process that started this rank has ended, then kill this rank's session."""
    life.poll(None)  # nothing is ever sent, so it returns when the other end is closed
    os.killpg(0, signal.SIGKILL)
