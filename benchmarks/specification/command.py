"""How every command ends: bad input, Ctrl-C and a closed pipe are one line or none."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable
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


def leave_interrupts_to_parent() -> None:
    """For worker processes: Ctrl-C is said in one line by the command that started them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
