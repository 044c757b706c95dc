"""How every command ends (with one line after bad input or Ctrl-C, silently on a closed pipe), and
how it shows progress: as a bar on a terminal, as occasional lines in a log."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Column

from benchmarks.specification import SpecError as SpecError

if TYPE_CHECKING:
    from concurrent.futures import ProcessPoolExecutor

T = TypeVar("T")

CONSOLE = Console(stderr=True)
_FIRST_LINE_S = 2.0  # work that takes less time prints no line in a log
_LOG_EVERY_S = 10.0


def progress_line() -> Progress:
    """A progress bar with counts, time and the current work, in one line of the terminal; in a log
    it prints a line after 2 s and then every 10 s."""
    rest_of_the_line = Column(no_wrap=True, overflow="ellipsis", ratio=1)
    return _Logged(
        BarColumn(bar_width=8),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False, table_column=rest_of_the_line),
        console=CONSOLE,
        transient=True,
        expand=True,
        disable=not CONSOLE.is_terminal,
    )


class _Logged(Progress):
    """A progress bar that prints lines instead if there is no terminal."""

    def __init__(self, *columns: ProgressColumn, **options: Any) -> None:
        super().__init__(*columns, **options)
        self._started = time.monotonic()
        self._next = self._started + _FIRST_LINE_S

    def update(self, task_id: TaskID, **fields: Any) -> None:
        """Update a task as rich does, and print a line from time to time if there is no
        terminal."""
        super().update(task_id, **fields)
        self._tell(task_id)

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        """Advance a task as rich does, and print a line from time to time if there is no
        terminal."""
        super().advance(task_id, advance)
        self._tell(task_id)

    def _tell(self, task_id: TaskID) -> None:
        now = time.monotonic()
        if not self.disable or now < self._next:
            return
        self._next = now + _LOG_EVERY_S
        task = next(task for task in self.tasks if task.id == task_id)
        of = "" if task.total is None else f" of {task.total:.0f}"
        line = f"  {now - self._started:.0f} s: {task.completed:.0f}{of}, {task.description}"
        self.console.print(line, markup=False, soft_wrap=True)


def track(items: Iterable[T], total: int | None, of_what: str) -> Iterator[T]:
    """The items, with a progress line while they are consumed."""
    with progress_line() as bar:
        line = bar.add_task(of_what, total=total)
        for item in items:
            yield item
            bar.advance(line)


INTERRUPTED = 130  # the exit status that shells expect after Ctrl-C


class CommandParser(argparse.ArgumentParser):
    """An ArgumentParser that raises SpecError on bad arguments instead of printing its usage."""

    def error(self, message: str) -> NoReturn:
        """Raise SpecError with argparse's message."""
        raise SpecError(f"{message} (see --help)")


def run_command(main: Callable[[], int], interrupted: str = "interrupted") -> int:
    """Run a command's ``main`` and return its exit status.

    After bad input (SpecError) it prints one line and returns 2; after Ctrl-C it prints the line
    ``interrupted`` and returns 130. If the reader of the output has closed it (``| head``), it
    prints nothing.
    """
    try:
        status = main()
        sys.stdout.flush()
        return status
    except SpecError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the interpreter takes a moment to end
        print(interrupted, file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the interpreter flushes stdout at its end
        return 0


def command(main: Callable[[], int]) -> Callable[[], int]:
    """A decorator for a command's ``main``: what ``run_command`` makes of it."""
    return wraps(main)(partial(run_command, main))


def check_writable(field: str, directory: Path) -> None:
    """Make a folder for results; raises SpecError if it cannot be written to."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            return
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise SpecError(f"{field}={directory}: cannot be written to: {why}") from None


@contextmanager
def workers(count: int, start: str = "spawn") -> Iterator[ProcessPoolExecutor]:
    """A pool of so many processes, started as multiprocessing's ``start`` says. If the body is left
    by an error or by Ctrl-C, they end at once."""
    import multiprocessing  # these imports take a tenth of what a command's --help takes
    from concurrent.futures import ProcessPoolExecutor

    context = multiprocessing.get_context(start)
    pool = ProcessPoolExecutor(count, context, leave_interrupts_to_parent)
    try:
        yield pool
    except BaseException:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # another Ctrl-C cannot make it any faster
        for child in multiprocessing.active_children():
            child.kill()
        pool.shutdown(cancel_futures=True)
        raise
    pool.shutdown()


def leave_interrupts_to_parent() -> None:
    """Ignore Ctrl-C in a worker process: the command that started it reports it in one line."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
