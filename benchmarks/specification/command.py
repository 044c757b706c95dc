"""How every command ends: with one line after bad input, after Ctrl-C and where a package is
missing, silently on a closed pipe.

For this a command imports in its ``main`` what is not Python's own, or takes long.
"""

from __future__ import annotations

import argparse
import errno
import io
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from benchmarks import CHECKOUT
from benchmarks.specification import SpecError as SpecError
from zeropp.types.data import IN_WHEEL

if TYPE_CHECKING:
    from concurrent.futures import ProcessPoolExecutor

INTERRUPTED = 130  # the exit status that shells expect after Ctrl-C


class CommandParser(argparse.ArgumentParser):
    """An ArgumentParser that raises SpecError on bad arguments instead of printing its usage."""

    def error(self, message: str) -> NoReturn:
        """Raise SpecError with argparse's message."""
        raise SpecError(f"{message} (see --help)")


def run_command(main: Callable[[], int], interrupted: str = "interrupted", closed: int = 0) -> int:
    """Run a command's ``main`` and return its exit status.

    After bad input (SpecError) it prints one line and returns 2, as where this Python is too old or
    lacks a package; after Ctrl-C it prints the line ``interrupted`` and returns 130. If the output
    is closed, at once or by its reader (``| head``), it ends and returns ``closed``; where a disk
    has no room for it, it prints one line. SIGTERM ends its worker processes with it. What the
    terminal's character set lacks is printed as a question mark.
    """
    if set(os.environ.get("COLUMNS", "")) == {"0"}:  # no terminal is known; nothing fits into 0
        del os.environ["COLUMNS"]
    for stream in ("stdout", "stderr"):
        if getattr(sys, stream) is None:  # closed by the caller, as `>&-` does
            setattr(sys, stream, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):  # tests and notebooks have others
        sys.stdout.reconfigure(errors="replace")
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _end_with_workers)
    try:
        if sys.version_info < (3, 11):  # noqa: UP036  (older ones get a message, not a traceback)
            found = sys.version.split()[0]
            raise SpecError(f"this Python is {found}, and 3.11 or newer is needed: {_remedy()}")
        status = main()
        sys.stdout.flush()
        return status
    except SpecError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in ("zeropp", "baselines", "benchmarks"):
            raise  # a mistake of ours
        missing = f"{error.name} is not installed for {sys.executable}"
        print(f"error: {missing}: {_remedy()}", file=sys.stderr)
        return 2
    except (BrokenPipeError, SystemExit) as error:
        if BrokenPipeError not in map(type, (error, error.__context__)):  # what rich makes of one
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the interpreter flushes stdout at its end
        return closed
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        print(f"error: {error.filename or 'output'}: no space left on device", file=sys.stderr)
        return 2
    except BaseException as error:
        if not _is_ctrl_c(error):
            raise
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the interpreter takes a moment to end
        print(interrupted, file=sys.stderr)
        return INTERRUPTED


def _remedy() -> str:
    """What gives the user a Python with the suite's packages."""
    if IN_WHEEL:
        return "pip install 'zeropp[explain]'"
    installed = CHECKOUT / ".venv"
    if (activate := installed / "bin" / "activate").exists() and Path(sys.prefix) != installed:
        return f"source {activate}"
    return "pip install -e '.[suite]'"


def _is_ctrl_c(error: BaseException | None) -> bool:
    """Whether an error is Ctrl-C, or what an import that it interrupted made of it."""
    return isinstance(error, KeyboardInterrupt) or (
        error is not None and _is_ctrl_c(error.__cause__ or error.__context__)
    )


def _end_with_workers(number: int, _: object) -> None:
    """On SIGTERM: end this command as ever, and its worker processes first, which would go on."""
    if (processes := sys.modules.get("multiprocessing")) is not None:
        for child in processes.active_children():
            child.kill()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


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
    """A pool of ``count`` processes, started as multiprocessing's ``start`` says. If the body is
    left by an error or by Ctrl-C, they end at once."""
    import multiprocessing  # these imports take a tenth of what a command's --help takes
    from concurrent.futures import ProcessPoolExecutor

    context = multiprocessing.get_context(start)
    pool = ProcessPoolExecutor(count, context, _begin_worker)
    try:
        yield pool
    except BaseException:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # another Ctrl-C cannot make it any faster
        for child in multiprocessing.active_children():
            child.kill()
        pool.shutdown(cancel_futures=True)
        raise
    pool.shutdown()


def _begin_worker() -> None:
    """Ignore Ctrl-C in a worker process: the command that started it reports it in one line. End
    with that command, however it ends: one that was killed has ended none of its workers."""
    from multiprocessing import parent_process  # as in ``workers``
    from threading import Thread

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        parent.join()
        os._exit(1)

    Thread(target=end_with_parent, daemon=True).start()
