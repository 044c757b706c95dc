"""Ranks of this machine as processes that are forked from one which has imported torch.

Importing torch and DeepSpeed takes seconds of processor time, and every rank of every point would
pay it anew. The fork server of ``multiprocessing`` imports them once per sweep. It never touches a
device, so that a forked rank may: DeepSpeed, whose import asks CUDA for its devices, is imported
beforehand for CPU ranks alone.
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

# A forked process imports the launcher's main module anew: what that imports is here, too.
_PRELOADED = ("torch.distributed", "benchmarks.specification.compose", "benchmarks.launch.sweep")
# The CPU ranks' own: dynamo is what optimizers import on their first step.
_PRELOADED_ON_CPU = (
    "benchmarks.worker.__main__",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "zeropp.contender.trainer",
    "baselines.deepspeed_3d.trainer",
    "baselines.torch_pp.trainer",
    "baselines.fsdp.trainer",
)
_CONTEXT = multiprocessing.get_context("forkserver")


def start_rank(
    arguments: Sequence[str], *, rank: int, variables: Mapping[str, str], log: Path, on_cpu: bool
) -> BaseProcess:
    """Start one rank: ``python -m benchmarks.worker`` with these arguments.

    ``variables`` are added to its environment; what it prints goes to ``log``. The first call of a
    process starts the fork server, whose imports serve all later ranks.
    """
    _CONTEXT.set_forkserver_preload([*_PRELOADED, *(_PRELOADED_ON_CPU if on_cpu else ())])
    life, _ = _line_of_life()
    process = _CONTEXT.Process(
        target=_be_rank, args=(list(arguments), dict(variables), log, life), name=f"rank {rank}"
    )
    process.start()
    return process


@cache
def _line_of_life() -> tuple[Connection, Connection]:
    """A pipe whose writing end this process alone holds: ranks read its end when it is gone."""
    return _CONTEXT.Pipe(duplex=False)


def _be_rank(arguments: list[str], variables: dict[str, str], log: Path, life: Connection) -> None:
    """What a rank's process does: a session of its own, its variables, its log, its work."""
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
    """No rank outlives the process that started it, however that one died."""
    life.poll(None)  # nothing is ever sent: it returns when the other end is closed
    os.killpg(0, signal.SIGKILL)
