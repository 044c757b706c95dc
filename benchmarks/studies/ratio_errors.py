"""A simulated ratio of two plans' speeds with its error: the factor within which the simulator's
ratios of nine in ten pairs of published runs are of the measured ones.

Pairs of one program differ in their degrees; pairs of two programs have one model, batch and
device. Of the latter the error is larger, because what is missed of a program does not cancel.
"""

from __future__ import annotations

import csv
from functools import cache

import numpy as np

from benchmarks import CHECKOUT

ERRORS = CHECKOUT / "results" / "reference" / "validation" / "errors.csv"
NOTE = (
    "In brackets: where nine in ten measured ratios are, by the simulator's errors on pairs of "
    "published runs of one program, or of two."
)


@cache
def factor(*, one_program: bool) -> float:
    """The factor within which nine in ten simulated ratios are of the measured ones."""
    if one_program:
        with ERRORS.open(newline="", encoding="utf-8") as file:
            rows = [row for row in csv.DictReader(file) if row["kind"] == "ratio"]
        return 1 + next(float(row["p90"]) for row in rows if row["source"] == "all sources")
    from benchmarks.studies.claim_33.uncertainty import published_pairs

    return float(np.exp(np.quantile(np.abs(published_pairs()), 0.9)))


def ratio_text(ratio: float, *, one_program: bool) -> str:
    """``1.18 [1.02, 1.37]``; without brackets where both plans are the same."""
    if ratio == 1:
        return "1.00"
    reach = factor(one_program=one_program)
    return f"{ratio:.2f} [{ratio / reach:.2f}, {ratio * reach:.2f}]"
