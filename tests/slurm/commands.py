"""The suite's commands as processes of their own, forked from a server that has imported the suite.

An interpreter per call and its imports would take most of the tests' time; a fork does the same in
a third of it. The server has one thread, so that no fork finds a lock that another thread holds.
What is run is the ``main`` of the module.
"""

from __future__ import annotations

import gc
import importlib
import io
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from benchmarks import CHECKOUT
from tests.waiting import LIMIT_S

_AT_ONCE = threading.BoundedSemaphore(3)  # tests in threads would start twenty at the same time
# What the commands import when they are called, so that it is imported once.
_PRELOADED = (
    "benchmarks.run",
    "benchmarks.status",
    "benchmarks.launch.sweep",
    "benchmarks.launch.sweep",
    "benchmarks.launch.sweep_status",
    "benchmarks.report.write",
)


@cache
def server() -> _Server:
    """The server, which starts with the first call."""
    return _Server()


class _Server:
    """Forks commands, and tells how they end, until the process with the tests ends."""

    def __init__(self) -> None:
        self._pipe, theirs = multiprocessing.Pipe()
        self._lock = threading.Lock()
        code = f"from tests.slurm.commands import serve; serve({theirs.fileno()})"
        subprocess.Popen([sys.executable, "-c", code], cwd=CHECKOUT, pass_fds=[theirs.fileno()])
        theirs.close()

    def ask(self, *question: Any) -> Any:
        """What it answers to a command, or to the number of a process."""
        with self._lock:
            self._pipe.send(question)
            return self._pipe.recv()


def serve(descriptor: int) -> None:
    """The server's life: a command is answered with the number of its process, and such a number
    with its exit status, None as long as it runs."""
    pipe = Connection(descriptor)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for the process with the tests
    _preload()
    while True:
        try:
            question = pipe.recv()
        except EOFError:
            return
        if len(question) > 1:
            pid = os.fork()
            if pid == 0:
                pipe.close()
                _be(*question)
            pipe.send(pid)
        else:
            pid, status = os.waitpid(question[0], os.WNOHANG)
            pipe.send(os.waitstatus_to_exitcode(status) if pid else None)


def _preload() -> None:
    """Import what the commands need, and make all validators of records and specifications."""
    from benchmarks.launch.attempt import Header
    from benchmarks.launch.points import plan_point
    from benchmarks.launch.slurm.submissions import Submission
    from benchmarks.launch.sweep import spec_of
    from benchmarks.records.record import GateResult, RankRecord, RunRecord
    from benchmarks.specification.compose import compose
    from benchmarks.specification.reading import adapter

    for name in _PRELOADED:
        importlib.import_module(name)
    _read_configuration_files_once()
    (config,) = compose("config", ["launcher=slurm"])
    plan_point(spec_of(config))
    kinds: tuple[type[Any], ...] = (Header, Submission, GateResult, RankRecord, RunRecord)
    for kind in kinds:
        adapter(kind)
    gc.freeze()  # to look for garbage among these objects would copy their memory into each fork


def _read_configuration_files_once() -> None:
    """Hydra reads every file of ``conf/`` for each point of each command, which takes half of a
    command's time. Its cache is of one point; here it serves all that is forked later."""
    from hydra._internal.config_repository import ConfigRepository

    read, known = ConfigRepository.load_config, dict[str, Any]()

    def load(self: ConfigRepository, config_path: str) -> Any:
        if config_path not in known:
            known[config_path] = read(self, config_path)
        return known[config_path]

    ConfigRepository.load_config = load  # type: ignore[method-assign]


class Command:
    """One call of ``python -m MODULE WORDS`` with exactly this environment, after a function of the
    caller's, ``first``, has been called in that process."""

    def __init__(
        self,
        module: str,
        words: Sequence[str],
        environment: Mapping[str, str],
        first: Callable[[], None] | None = None,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="command-")
        self._files = [Path(self._folder.name) / name for name in ("stdout", "stderr")]
        for path in self._files:
            path.touch()
        self.returncode: int | None = None
        self.pid: int = server().ask(module, list(words), dict(environment), self._files, first)

    def wait(self) -> int:
        """The exit status, negative for a signal. A command that does not end is killed:
        TimeoutError."""
        deadline = time.monotonic() + LIMIT_S
        while self.returncode is None:
            if time.monotonic() > deadline:
                os.kill(self.pid, signal.SIGKILL)
                raise TimeoutError(f"not ended within {LIMIT_S:g} s: {self.printed}")
            time.sleep(0.05)
            self.returncode = server().ask(self.pid)
        return self.returncode

    @property
    def stdout(self) -> str:
        """What it has printed so far."""
        return self._files[0].read_text()

    @property
    def printed(self) -> str:
        """The same with what went to stderr, which stands at the end."""
        return "".join(path.read_text() for path in self._files)


def call(
    module: str,
    words: Sequence[str],
    environment: Mapping[str, str],
    first: Callable[[], None] | None = None,
) -> Command:
    """Run a command to its end; a few at the same time wait for each other."""
    with _AT_ONCE:
        command = Command(module, words, environment, first)
        command.wait()
    return command


def _be(
    module: str,
    words: Sequence[str],
    environment: Mapping[str, str],
    files: Sequence[Path],
    first: Callable[[], None] | None,
) -> NoReturn:
    """What the forked process does."""
    code = 1
    try:
        os.environ.clear()
        os.environ.update(environment)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number, path in enumerate(files, start=1):
            os.dup2(os.open(path, os.O_WRONLY), number)
        sys.stdout = io.TextIOWrapper(io.FileIO(1, "w"), line_buffering=True)
        sys.stderr = io.TextIOWrapper(io.FileIO(2, "w"), line_buffering=True)
        sys.argv = [module, *words]
        if first is not None:
            first()
        code = importlib.import_module(module).main()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
