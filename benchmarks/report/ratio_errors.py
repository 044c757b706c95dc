"""How wrong a simulated number may be, from published runs that were priced as strangers: with
constants and programs of other sources alone (``strangers``).

An interval holds nine in ten of these runs, where every source weighs the same, however many runs
it published; as many are above it as below, so that it need not be symmetric. That of a ratio of
two plans' speeds is the factor within which nine in ten simulated ratios are of the measured ones:
of pairs of one program, or of two, with one model, batch and devices.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, combinations
from math import exp, inf, log, log1p
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
# How the names of sources begin whose runs their program's or their hardware's maker has tuned.
VENDORS = ("NVIDIA", "NeMo", "MLPerf", "Megatron-", "Reducing Activation")
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
    cells in the validation. ``blind`` is the error of the price that they had before anybody had
    looked at their source for causes, and else that as a stranger."""
    cells = {row["place"]: row for row in priced_runs()}
    prices = {row["place"]: row["predicted"] for row in _read("blind.csv") if row["predicted"]}
    runs = [cells.get(run["place"], {}) | run for run in _read("stranger_runs.csv")]
    for run in runs:
        run["blind"] = run["stranger"]
        if (price := prices.get(run["place"])) and "metric" in run:
            error = float(price) / float(run["value"])
            run["blind"] = str((1 / error if "time" in run["metric"] else error) - 1)
    return runs


def _read(name: str) -> list[dict[str, str]]:
    with (_VALIDATION / name).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def quantile_of(errors: Iterable[tuple[str, float]], share: float) -> float:
    """The error that this share of errors does not exceed, where every source weighs the same;
    ``errors`` are of a source each. Not a number where there is none."""
    by_source: dict[str, list[float]] = defaultdict(list)
    for source, error in errors:
        by_source[source].append(error)
    weighed = sorted((error, 1 / len(of)) for of in by_source.values() for error in of)
    reached = accumulate(weight for _, weight in weighed)
    needed = share * len(by_source) - 1e-9
    return next(
        (error for (error, _), sum_ in zip(weighed, reached, strict=True) if sum_ >= needed),
        float("nan"),
    )


def interval_of(errors: Iterable[tuple[str, float]]) -> float:
    """The size that nine in ten errors do not exceed, where every source weighs the same."""
    return quantile_of(((source, abs(error)) for source, error in errors), INSIDE)


def bounds_of(errors: Iterable[tuple[str, float]]) -> tuple[float, float]:
    """The least and the greatest error of the nine in ten that are neither among the smallest nor
    among the greatest twentieth, where every source weighs the same."""
    known = [*errors]
    return quantile_of(known, (1 - INSIDE) / 2), quantile_of(known, (1 + INSIDE) / 2)


def measured_over_priced(quantity: Literal["speed", "memory"] = "speed") -> tuple[float, float]:
    """Between which factors of its price nine in ten runs of ordinary people are measured, in speed
    or in memory: by the errors of sources that were priced before anybody had seen their numbers,
    and by those of strangers. Vendors' tuned runs are left out: they are nearer to their prices
    than those of whoever asks."""
    low, high = bounds_of(
        (run["source"], float(run["blind"]))
        for run in stranger_runs()
        if run["quantity"] == quantity and not run["source"].startswith(VENDORS)
    )
    return 1 / (1 + high), 1 / (1 + low)


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
    used, whose = (own, "this program") if len(own) >= FEWEST_PEAKS else (peaks, "all programs")
    share = interval_of(
        (run["source"], max(0.0, float(run["value"]) / float(run["predicted"]) - 1)) for run in used
    )
    return Room(share, f"room of {share:.1%} (from {len(used)} published peaks of {whose})")


def error_text(program: str, label: str) -> str:
    """How far the simulator is from runs of sources that it had not seen, as words, with the error
    on those of one program (all entries whose names begin with ``program``) if enough sources
    have it."""
    speeds = [run for run in stranger_runs() if run["quantity"] == "speed"]
    sources = {run["source"] for run in speeds}
    vendors = sum(source.startswith(VENDORS) for source in sources)
    middle = quantile_of(((run["source"], abs(float(run["stranger"]))) for run in speeds), 0.5)
    low, high = measured_over_priced()
    whole = f"error {middle:.0%} in the median on {len(sources)} sources that it had not seen "
    whole += (
        f"({vendors} of them vendors'); nine in ten ordinary runs have {low:.2f} to {high:.2f} of "
    )
    whole += "the simulated speed"
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


NONE_WITH_TP = "Cannot be told: no program that may have it was searched."


def need_text(ratio: float, *, one_program: bool, is_cut: bool = False) -> str:
    """Whether tensor parallelism is needed, by the simulated speed without it over that with it: 0
    and infinity where no plan of one side fits, NaN where none of both does. ``is_cut``: a search
    may have missed the best plan."""
    words = f"{ratio - 1:.1%} faster" if ratio >= 1 else f"{1 - ratio:.1%} slower"
    if is_cut:
        known = f" So far the fastest plan without it is {words}." if 0 < ratio < inf else ""
        return f"Cannot be told, as a search was cut.{known}"
    if ratio != ratio:
        return "Cannot be told: no plan fits."
    if ratio in (0.0, inf):
        return "Yes: no plan without it fits." if ratio == 0 else "No: no plan with it fits."
    reach = factor(one_program=one_program, tensor=True)
    answer = "No" if ratio > reach else "Yes" if ratio < 1 / reach else "Cannot be told"
    return (
        f"{answer}: without it the fastest plan is {words}; nine in ten such ratios of "
        f"{'one program' if one_program else 'two programs'} are off by at most {reach - 1:.0%}."
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
    one with tensor parallelism and one without."""
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
