"""The suite's commands as processes of their own, forked from this one.

An interpreter per call and its imports would take most of the tests' time; a fork of a process that
has imported the suite does the same in a third of it. What is run is the ``main`` of the module.
"""

from __future__ import annotations

import gc
import importlib
import io
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra._internal.config_repository import ConfigRepository

from benchmarks.launch.attempt import Header
from benchmarks.launch.points import plan_point
from benchmarks.launch.slurm.submissions import Submission
from benchmarks.launch.sweep import spec_of
from benchmarks.records.record import GateResult, RankRecord, RunRecord
from benchmarks.specification.compose import compose
from benchmarks.specification.reading import adapter

# What the commands import when they are called, so that it is imported once.
_PRELOADED = (
    "benchmarks.run",
    "benchmarks.status",
    "benchmarks.launch.launchers",
    "benchmarks.launch.sweep",
    "benchmarks.launch.sweep_status",
    "benchmarks.report.write",
)
_AT_ONCE = threading.BoundedSemaphore(3)  # tests in threads would start twenty at the same time


def preload() -> None:
    """Import what the commands need, and make all validators, before the first thread forks one: a
    fork beside an import has that module's lock for ever, and beside a validator's making
    pydantic's."""
    for name in _PRELOADED:
        importlib.import_module(name)
    (config,) = compose("config", [])
    plan_point(spec_of(config))  # those of a specification
    kinds: tuple[type[Any], ...] = (Header, Submission, GateResult, RankRecord, RunRecord)
    for kind in kinds:
        adapter(kind)
    _read_configuration_files_once()


def _read_configuration_files_once() -> None:
    """Hydra reads every file of ``conf/`` for each point of each command, which takes half of a
    command's time. Its cache is of one point; here it serves all that is forked later."""
    read, known = ConfigRepository.load_config, dict[str, Any]()

    def load(self: ConfigRepository, config_path: str) -> Any:
        if config_path not in known:
            known[config_path] = read(self, config_path)
        return known[config_path]

    ConfigRepository.load_config = load  # type: ignore[method-assign]
    compose("config", ["launcher=slurm"])


class Command:
    """One call of ``python -m MODULE WORDS`` with exactly this environment."""

    def __init__(self, module: str, words: Sequence[str], environment: Mapping[str, str]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="command-")
        self._files = [Path(self._folder.name) / name for name in ("stdout", "stderr")]
        for path in self._files:
            path.touch()
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            _be(module, words, environment, self._files)

    def wait(self, seconds: float) -> int:
        """The exit status, negative for a signal. A command that does not end in time is killed:
        TimeoutError."""
        deadline = time.monotonic() + seconds
        while self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > deadline:
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
                raise TimeoutError(f"not ended within {seconds:g} s: {self.printed}")
            else:
                time.sleep(0.05)
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
    module: str, words: Sequence[str], environment: Mapping[str, str], seconds: float = 120
) -> Command:
    """Run a command to its end; a few at the same time wait for each other."""
    with _AT_ONCE:
        command = Command(module, words, environment)
        command.wait(seconds)
    return command


def _be(
    module: str, words: Sequence[str], environment: Mapping[str, str], files: Sequence[Path]
) -> None:
    """What the forked process does; never returns."""
    code = 1
    gc.freeze()  # to look for garbage among the parent's objects would copy its memory
    try:
        os.environ.clear()
        os.environ.update(environment)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number, path in enumerate(files, start=1):
            os.dup2(os.open(path, os.O_WRONLY), number)
        sys.stdout = io.TextIOWrapper(io.FileIO(1, "w"), line_buffering=True)
        sys.stderr = io.TextIOWrapper(io.FileIO(2, "w"), line_buffering=True)
        sys.argv = [module, *words]
        code = importlib.import_module(module).main()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
