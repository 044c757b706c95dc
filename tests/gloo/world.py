"""A world of worker processes kept alive across tests, each task in a process group of its own.

Importing torch in eight processes takes longer than most tests, so processes are forked from a
server that has imported it, and tasks are sent to them. Every wait is bounded; a world in which
a task failed or hung is killed, and the next task gets a new one.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import inspect
import io
import multiprocessing
import os
import reprlib
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import update_wrapper
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, cast

from benchmarks.launch.local import preloaded_on_cpu
from benchmarks.specification.contenders import CONTENDERS
from tests.waiting import LIMIT_S

# What tasks need and what is slow to import: beside what real ranks need, the tests' own modules,
# which every worker would import for itself.
PRELOADED = [
    *preloaded_on_cpu(CONTENDERS),
    "torch.distributed.checkpoint._fsspec_filesystem",  # checkpoints import it when they begin
    "torch.profiler",
    "zeropp.train.api",
    "pytest",
    "tests.gloo.cases",
    "tests.gloo.gate_faults",
    "tests.gloo.models",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2",
    "tests.gloo.frozen",  # the last one
]
_NICE = 5  # eight ranks on few cores leave room to the tests of the other pytest process
GRACE_S = 3.0  # for the other ranks to say what went wrong, after one said it


def start_server() -> None:
    """Let the server begin with its imports, while this process goes on."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)
    forkserver.ensure_running()


class WorkerError(AssertionError):
    """A rank raised, died or hung; the message has what every rank had to say."""


@dataclass(frozen=True)
class Place:
    """Where the ranks of one task meet: a part of the world's store."""

    task: str
    size: int
    timeout_s: float


class World:
    """Up to ``size`` ranks on gloo. Use as a context manager."""

    def __init__(self, size: int = 8) -> None:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        start_server()
        self._size = size
        self._context = multiprocessing.get_context("forkserver")
        self._workers: list[tuple[BaseProcess, Connection]] = []
        # One server for all tasks: a FileStore's readers poll, and wait for each other's locks.
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._tasks = 0

    def run(
        self, function: Callable[..., Any], *arguments: Any, size: int, timeout_s: float = LIMIT_S
    ) -> list[Any]:
        """Call ``function(*arguments)`` on ``size`` ranks of a fresh gloo group; results by rank.

        ``function`` and what it takes and gives must pickle. Raises WorkerError.
        """
        self._start(size)
        self._tasks += 1
        place = Place(f"task {self._tasks}", size, timeout_s)
        workers = self._workers[:size]
        for rank, (_, pipe) in enumerate(workers):
            pipe.send((function, arguments, rank, place))
        replies = self._collect(workers, timeout_s)
        failures = [f"rank {r}: {text}" for r, (ok, text) in enumerate(replies) if not ok]
        if failures:
            self._kill()
            raise WorkerError("\n".join(failures))
        return [value for _, value in replies]

    def __enter__(self) -> World:
        return self

    def __exit__(self, *error: object) -> None:
        self._kill()

    def _collect(
        self, workers: list[tuple[BaseProcess, Connection]], timeout_s: float
    ) -> list[tuple[bool, Any]]:
        replies: dict[int, tuple[bool, Any]] = {}
        pipes: dict[Any, int] = {pipe: rank for rank, (_, pipe) in enumerate(workers)}
        deadline = time.monotonic() + timeout_s
        while len(replies) < len(workers):
            left = deadline - time.monotonic()
            ready = wait([p for p, r in pipes.items() if r not in replies], max(0.0, left))
            if not ready:
                break
            for pipe in ready:
                rank = pipes[pipe]
                try:
                    replies[rank] = _unpacked(cast(Connection, pipe).recv_bytes())
                except (EOFError, OSError):  # before a reply, or within one; peers notice it
                    replies[rank] = (False, "died")
                    continue
                if not replies[rank][0]:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        return [replies.get(rank, (False, "no answer in time")) for rank in range(len(workers))]

    def _start(self, size: int) -> None:
        """Start what workers are missing for a task of ``size`` ranks."""
        assert size <= self._size
        while len(self._workers) < size:
            ours, theirs = self._context.Pipe()
            arguments = (theirs, self._store.port)
            process = self._context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))

    def _kill(self) -> None:
        for process, pipe in self._workers:
            process.kill()
            process.join(10)
            pipe.close()
        self._workers.clear()


def on_ranks(size: int | Callable[..., int]) -> Callable[[Callable[..., None]], Any]:
    """Make a test of a function that runs on this many ranks of ``world``, and must hold on each;
    ``size`` may be a function of the test's first parameter."""

    def test_of(body: Callable[..., None]) -> Any:
        signature = inspect.signature(body)
        names = [*signature.parameters]

        def test(world: World, **given: Any) -> None:
            count = size if isinstance(size, int) else size(given[names[0]])
            world.run(_run_body, body.__module__, body.__name__, given, size=count)

        update_wrapper(test, body)
        own = inspect.Parameter("world", inspect.Parameter.KEYWORD_ONLY)
        parameters = [*signature.parameters.values(), own]
        test.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return test

    return test_of


def _run_body(module: str, name: str, given: dict[str, Any]) -> None:
    getattr(importlib.import_module(module), name).__wrapped__(**given)


def _serve(pipe: Connection, port: int) -> None:
    """Life of a worker: tasks until the pipe closes."""
    import torch
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    _die_with_server()
    os.nice(_NICE)
    torch.set_num_threads(1)
    # Two ranks of a gloo group connect when one first sends to the other: most of them never do.
    os.environ["TORCH_GLOO_LAZY_INIT"] = "1"
    # One connection for all tasks: the store's server takes some dozens of them without a pause,
    # and then lets the next ones wait for 5 s.
    store = TCPStore("127.0.0.1", port, wait_for_workers=False)
    while True:
        try:
            task = pipe.recv()
        except EOFError:
            return
        try:
            packed = _packed((True, _run_task(store, *task)))
        except BaseException as error:
            packed = _packed((False, traceback.format_exc() + _values(error)))
        pipe.send_bytes(packed)
        gc.collect()


def _values(error: BaseException) -> str:
    """The variables that a failed assertion saw, which pytest does not show of other processes."""
    if not isinstance(error, AssertionError) or error.__traceback__ is None:
        return ""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    show = reprlib.Repr()
    show.maxother = show.maxstring = 200
    return "\n".join(f"{name} = {show.repr(value)}" for name, value in frame.f_locals.items())


def _packed(reply: tuple[bool, Any]) -> bytes:
    """A reply as bytes. A pipe would send each tensor as a file descriptor of shared memory, for
    which the receiver connects to the sender, a millisecond or more each."""
    import torch

    buffer = io.BytesIO()
    torch.save(reply, buffer)
    return buffer.getvalue()


def _unpacked(packed: bytes) -> tuple[bool, Any]:
    import torch

    reply: tuple[bool, Any] = torch.load(io.BytesIO(packed), weights_only=False)
    return reply


def _run_task(
    store: Any, function: Callable[..., Any], arguments: tuple[Any, ...], rank: int, place: Place
) -> Any:
    import torch.distributed as dist
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    limit = timedelta(seconds=place.timeout_s)
    store.set_timeout(limit)
    dist.init_process_group(
        "gloo",
        store=PrefixStore(place.task, store),
        rank=rank,
        world_size=place.size,
        timeout=limit,
    )
    try:
        result = function(*arguments)
        dist.barrier()
        return result
    finally:
        dist.destroy_process_group()


def _die_with_server() -> None:
    """Linux: leave with the fork server, which leaves with the tests."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
