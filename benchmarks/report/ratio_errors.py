"""How wrong a simulated number may be, from published runs that were priced as strangers: with
constants and programs of other sources alone (``strangers``).

An interval holds nine in ten of these runs, where every source weighs the same, however many runs
it published. That of a ratio of two plans' speeds is the factor within which nine in ten simulated
ratios are of the measured ones: of pairs of one program, or of two, with one model, batch and
devices.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from math import exp, log, log1p
from statistics import median
from typing import Literal

from zeropp.types.data import DATA

NOTE = (
    "In brackets: where nine in ten measured ratios are, by the simulator's errors on pairs of "
    "published runs of one program, or of two, whose source it had not seen."
)
INSIDE = 0.9  # the share of runs that an interval is to hold
FEWEST_RUNS, FEWEST_SOURCES = 20, 2  # of a program with an error of its own
FEWEST_PEAKS = 10  # of a program with an error of its own memory
METRIC_OF_PEAKS = "peak_memory"  # begins the metrics of a whole rank's memory
_VALIDATION = DATA / "results" / "reference" / "validation"
_SAME = (
    "layers", "hidden", "heads", "ffn", "vocab", "seq", "device", "num_gpus", "global_batch",
    "metric", "unit",
)  # fmt: skip


@cache
def priced_runs() -> list[dict[str, str]]:
    """The published runs that have a price: the cells of their first row in the validation."""
    rows = _read("validation.csv")
    return [row for row in rows if row["first_of_run"] == "yes" and row["relative_error"]]


@cache
def stranger_runs() -> list[dict[str, str]]:
    """The published runs that have a price as strangers, with their error (``stranger``) and their
    cells in the validation."""
    cells = {row["place"]: row for row in priced_runs()}
    return [cells.get(run["place"], {}) | run for run in _read("stranger_runs.csv")]


def _read(name: str) -> list[dict[str, str]]:
    with (_VALIDATION / name).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def interval_of(errors: Iterable[tuple[str, float]]) -> float:
    """The size that nine in ten errors do not exceed, where every source weighs the same;
    ``errors`` are of a source each."""
    by_source: dict[str, list[float]] = defaultdict(list)
    for source, error in errors:
        by_source[source].append(abs(error))
    weighed = [(error, 1 / len(of)) for of in by_source.values() for error in of]
    reached = 0.0
    for error, weight in sorted(weighed):
        reached += weight
        if reached >= INSIDE * len(by_source) - 1e-9:
            return error
    return float("nan")


@dataclass(frozen=True)
class Room:
    """The share by which a run may take more memory than its price: of the limit that a plan must
    keep. ``words`` say where it is from."""

    share: float
    words: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "words", self.words or f"memory_margin={self.share:g}")


@cache
def memory_room(programs: Iterable[str]) -> Room:
    """The room that plans of a program must leave, by the published peaks of its own ``programs``
    where there are enough, and else by those of all: what nine in ten took beyond their price,
    where every source weighs the same. Most of these runs helped to describe their program."""
    peaks = [run for run in priced_runs() if METRIC_OF_PEAKS in run["metric"]]
    own = [run for run in peaks if run["program"] in programs]
    used, whose = (own, "its own") if len(own) >= FEWEST_PEAKS else (peaks, "all programs'")
    share = interval_of(
        (run["source"], max(0.0, float(run["value"]) / float(run["predicted"]) - 1)) for run in used
    )
    return Room(share, f"room of {share:.1%} ({len(used)} of {whose} published peaks)")


def error_text(program: str, label: str) -> str:
    """How far the simulator is from runs of sources that it had not seen, as words, with the error
    on those of one program (all entries whose names begin with ``program``) if enough sources
    have it."""
    speeds = [run for run in stranger_runs() if run["quantity"] == "speed"]
    errors = [(run["source"], float(run["stranger"])) for run in speeds]
    middle = median(abs(error) for _, error in errors)
    whole = f"error as a stranger {middle:.0%} in the median, nine in ten runs within"
    whole = f"{whole} {interval_of(errors):.0%}"
    own = [run for run in speeds if run["program"].startswith(program)]
    sources = {run["source"] for run in own}
    if not own:
        return f"no published run of {label}: {whole}"
    if len(own) < FEWEST_RUNS or len(sources) < FEWEST_SOURCES:
        return f"{len(own)} published runs of {label}, too few for an error of its own: {whole}"
    there = median(abs(float(run["stranger"])) for run in own)
    return f"{whole}; {there:.0%} on {len(own)} published runs of {label} by {len(sources)} sources"


def ratio_text(ratio: float, *, one_program: bool, tensor: bool = False) -> str:
    """``1.18 [1.02, 1.37]``; without brackets where both plans are the same."""
    if ratio == 1:
        return "1.00"
    reach = factor(one_program=one_program, tensor=tensor)
    return f"{ratio:.2f} [{ratio / reach:.2f}, {ratio * reach:.2f}]"


def need_text(ratio: float, *, one_program: bool) -> str:
    """Whether tensor parallelism is needed, by the simulated speed without it over that with it: 0
    and infinity where no plan of one side fits, NaN where none of both does."""
    if ratio != ratio:
        return "Cannot be told: no plan fits."
    if ratio in (0.0, float("inf")):
        return "Yes: no plan without it fits." if ratio == 0 else "No: no plan with it fits."
    reach = factor(one_program=one_program, tensor=True)
    words = f"{ratio - 1:.1%} faster" if ratio >= 1 else f"{1 - ratio:.1%} slower"
    if not 1 / reach <= ratio <= reach:
        return f"{'No' if ratio > 1 else 'Yes'}: without it the fastest plan is {words}."
    return (
        f"Cannot be told: without it the fastest plan is {words} as priced, and such ratios are "
        f"off by up to {reach - 1:.0%}."
    )


@cache
def factor(*, one_program: bool, tensor: bool = False) -> float:
    """The factor within which nine in ten simulated ratios are of the measured ones; with
    ``tensor``, of plans without tensor parallelism over plans with it."""
    known = pairs(one_program=one_program, tensor=tensor)
    return exp(interval_of((source, error) for source, error, _ in known))


@cache
def pairs(
    *,
    one_program: bool,
    error: Literal["stranger", "in_sample"] = "stranger",
    tensor: bool = False,
) -> list[tuple[str, float, float]]:
    """Of pairs of published runs of one program, or of two, the source of the first, the error of
    the ratio of their speeds as a logarithm, and the measured ratio as one. ``tensor``: only those
    of which one has tensor parallelism and the other has none."""
    groups = defaultdict(list)
    for run in stranger_runs():
        if run["quantity"] == "speed" and run.get("layers"):
            speed = log(float(run["value"])) * (-1 if "time" in run["metric"] else 1)
            run_of = (run["source"], run["program"], log1p(float(run[error])), speed)
            groups[tuple(run[key] for key in _SAME)].append((*run_of, int(run["tp"]) > 1))
    return [
        (source, off - other_off, speed - other_speed)
        for runs in groups.values()
        for (source, name, off, speed, has), (_, other, other_off, other_speed, other_has) in (
            combinations(runs, 2)
        )
        if (name == other) is one_program and (has != other_has or not tensor)
    ]
