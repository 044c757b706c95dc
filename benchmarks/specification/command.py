"""How every command ends: with one line after bad input or Ctrl-C, silently on a closed pipe."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from benchmarks.specification.spec_error import SpecError

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
        print(interrupted, file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the interpreter flushes stdout at its end
        return 0


def check_writable(field: str, directory: Path) -> None:
    """Make a folder for results; raises SpecError if it cannot be written to."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            return
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise SpecError(f"{field}={directory}: cannot be written to: {why}") from None


def leave_interrupts_to_parent() -> None:
    """Ignore Ctrl-C in a worker process: the command that started it reports it in one line."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
