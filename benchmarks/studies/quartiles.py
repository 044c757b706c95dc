"""Medians with quartiles of what a study has measured, and how often it measures."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence

LEAST_REPEATS = 2  # quartiles of one value are not defined


def quartiles(values: Sequence[float]) -> dict[str, float]:
    """The median and the quartiles of at least ``LEAST_REPEATS`` values, in their unit."""
    low, median, high = statistics.quantiles(values, n=4)
    return {"median": median, "q1": low, "q3": high}


def add_repeats(parser: argparse.ArgumentParser, what: str) -> None:
    """Add ``--repeats`` to a command: how many times it measures, and ``what`` it counts."""
    parser.add_argument("--repeats", type=_repeats, default=15, help=f"{what} (%(default)s)")


def _repeats(text: str) -> int:
    """Read a number of repeats; argparse prints the error with the name of the option."""
    if not text.isdecimal() or int(text) < LEAST_REPEATS:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a whole number of at least {LEAST_REPEATS}, which quartiles need"
        )
    return int(text)
