"""How every command ends: bad input, Ctrl-C and a closed pipe are one line or none."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from benchmarks.specification.run_spec import SpecError

INTERRUPTED = 130  # what a shell expects of a command that Ctrl-C ended


class CommandParser(argparse.ArgumentParser):
    """argparse whose complaints are bad input like any other: one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        """Raise SpecError with what argparse found wrong."""
        raise SpecError(f"{message} (see --help)")


def run_command(main: Callable[[], int], interrupted: str = "interrupted") -> int:
    """Run a command's ``main`` and return its exit status.

    2 with one line on bad input (SpecError), 130 with the line ``interrupted`` after Ctrl-C, and
    nothing at all where whoever read the output has gone (``| head``).
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
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the interpreter flushes it once more
        return 0


def check_writable(field: str, directory: Path) -> None:
    """Make a folder for results; raises SpecError where nothing could be written into it."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            return
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise SpecError(f"{field}={directory}: cannot be written to: {why}") from None
