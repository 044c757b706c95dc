"""A simulated ratio of two plans' speeds with its error: the factor within which the simulator's
ratios of nine in ten pairs of published runs are of the measured ones.

Pairs of one program differ in their degrees; pairs of two programs have one model, batch and
devices. Of the latter the error is larger, because what is missed of a program does not cancel.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from functools import cache
from itertools import combinations
from math import exp, log
from statistics import quantiles

from zeropp.types.data import DATA

NOTE = (
    "In brackets: where nine in ten measured ratios are, by the simulator's errors on pairs of "
    "published runs of one program, or of two."
)
_VALIDATION = DATA / "results" / "reference" / "validation"
_SAME = (
    "layers", "hidden", "heads", "ffn", "vocab", "seq", "device", "num_gpus", "global_batch",
    "metric", "unit",
)  # fmt: skip


@cache
def priced_runs() -> list[dict[str, str]]:
    """The published runs that have a price: the cells of their first row in the validation."""
    with (_VALIDATION / "validation.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return [row for row in rows if row["first_of_run"] == "yes" and row["relative_error"]]


def ratio_text(ratio: float, *, one_program: bool) -> str:
    """``1.18 [1.02, 1.37]``; without brackets where both plans are the same."""
    if ratio == 1:
        return "1.00"
    reach = factor(one_program=one_program)
    return f"{ratio:.2f} [{ratio / reach:.2f}, {ratio * reach:.2f}]"


@cache
def factor(*, one_program: bool) -> float:
    """The factor within which nine in ten simulated ratios are of the measured ones."""
    if one_program:
        with (_VALIDATION / "errors.csv").open(newline="", encoding="utf-8") as file:
            rows = [row for row in csv.DictReader(file) if row["kind"] == "ratio"]
        return 1 + next(float(row["p90"]) for row in rows if row["source"] == "all sources")
    groups = defaultdict(list)
    for row in priced_runs():
        if "memory" not in row["metric"]:
            run = row["program"], log(float(row["predicted"]) / float(row["value"]))
            groups[tuple(row[key] for key in _SAME)].append(run)
    errors = [
        abs(first[1] - second[1])
        for runs in groups.values()
        for first, second in combinations(runs, 2)
        if first[0] != second[0]
    ]
    return exp(quantiles(errors, n=10)[-1])
