"""How far the predictions of published rows are off, per run and per pair of runs.

The error of a pair is that of the ratio of its two values: predicted ratio over measured ratio - 1.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any, Literal

import numpy as np

from benchmarks.validation.cases import EIGHT_BIT
from benchmarks.validation.predict import Prediction, RowOutcome
from benchmarks.validation.rows import SPEEDS, PublishedRow
from benchmarks.validation.stated import cluster_of
from zeropp.price.programs import program_named

# The columns of schedule and parallelism.
DIFFER = (
    "tp", "pp", "chunks", "dp", "zero", "zero1_group", "zero3_group", "schedule",
    "sequence_parallel", "cuts",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two published runs that differ only in schedule or parallelism (``kind`` is ratio), or only
    in the microbatch, and the ratio of the first one's value to the second one's."""

    first: PublishedRow
    second: PublishedRow
    kind: Literal["ratio", "microbatch"]
    measured: float
    predicted: float

    @property
    def relative_error(self) -> float:
        """The predicted ratio over the measured ratio, minus 1."""
        return self.predicted / self.measured - 1.0

    @property
    def ordered(self) -> bool | None:
        """Whether the predicted order is the measured one; None where the two runs differ by 2 % or
        less, and no order is known."""
        if abs(np.log(self.measured)) <= np.log(1.02):
            return None
        return (self.measured > 1) is (self.predicted > 1)


def pairs_of(predictions: Iterable[Prediction]) -> list[Pair]:
    """All pairs of throughput rows with the same metric and unit."""
    groups: dict[tuple[Any, ...], list[Prediction]] = defaultdict(list)
    free = (*DIFFER, "micro_batch", "table")
    for prediction in predictions:
        if prediction.kind == "throughput":
            row = prediction.row
            equal = tuple((name, cell) for name, cell in row.run if name not in free)
            groups[row.metric, row.unit, equal].append(prediction)
    return [
        Pair(
            first=first.row,
            second=second.row,
            kind=kind,
            measured=first.row.measured / second.row.measured,
            predicted=first.value / second.value,
        )
        for members in groups.values()
        for first, second in combinations(members, 2)
        if (kind := _kind(first.row, second.row))
    ]


def _kind(first: PublishedRow, second: PublishedRow) -> Literal["ratio", "microbatch"] | None:
    other = any(getattr(first, field) != getattr(second, field) for field in DIFFER)
    if first.micro_batch == second.micro_batch:
        return "ratio" if other else None
    return None if other else "microbatch"


def predictions_of(outcomes: Iterable[RowOutcome]) -> list[Prediction]:
    """The predictions of the lines that have one."""
    return [outcome.prediction for outcome in outcomes if outcome.prediction is not None]


def first_of_runs(predictions: Iterable[Prediction]) -> list[Prediction]:
    """One prediction per run and quantity. A run whose speed is printed in three units counts once,
    by its first row. Equal rows with the same metric are repeated runs, and all of them count."""
    repeats: Counter[tuple[Any, ...]] = Counter()
    seen: set[tuple[Any, ...]] = set()
    first = []
    for prediction in predictions:
        row, kind = prediction.row, prediction.row.measure.kind
        repeats[row.run, row.metric] += 1
        quantity = "speed" if kind in SPEEDS else row.metric
        key = (row.run, quantity, repeats[row.run, row.metric])
        if key not in seen:
            seen.add(key)
            first.append(prediction)
    return first


@dataclass(frozen=True, kw_only=True)
class Errors:
    """The absolute relative errors of one source and kind (throughput, memory, or the ratio of two
    runs), those of a run in speed, also where a time was published. ``rows`` counts printed
    numbers; all else is over ``runs``."""

    kind: str
    source: str
    role: str  # fitted, adjusted or held out; of totals over several: both
    rows: int
    runs: int
    median: float
    p90: float
    bias: float | None = None  # the median with its sign: + is too fast, or too much memory
    signs: float | None = None  # of pairs: the share whose order is right
    ordered: int = 0  # the pairs that differ enough for that

    def cells(self) -> dict[str, Any]:
        """The line of ``errors.csv``."""
        shares = {name: getattr(self, name) for name in ("median", "p90", "bias", "signs")}
        written = {name: "" if of is None else f"{of:.4f}" for name, of in shares.items()}
        return asdict(self) | written

    def line(self) -> str:
        """The line that is printed under ``HEADER``, in 100 columns."""
        source = self.source if len(self.source) <= 30 else f"{self.source[:29]}…"
        bias = "" if self.bias is None else f"{self.bias:+.1%}"
        signs = "" if self.signs is None else f"{self.signs:.0%} of {self.ordered}"
        return (
            f"{self.kind:10}  {source:30}  {self.role:8}  {self.rows:4}  {self.runs:4}  "
            f"{self.median:6.1%}  {self.p90:6.1%}  {bias:>6}  {signs}"
        ).rstrip()


HEADER = f"{'kind':10}  {'source':30}  {'role':8}  rows  runs  median     p90    bias  signs"


KINDS = ("throughput", "memory", "ratio", "microbatch")


def errors_of(predictions: Sequence[Prediction]) -> list[Errors]:
    """Errors per kind and source, per software generation and device, and over all sources; ratios
    come last."""
    rows: Counter[tuple[str, str, str]] = Counter()
    signed: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for prediction in predictions:
        rows.update(_groups(prediction.kind, prediction.row))
    runs = first_of_runs(predictions)
    for prediction in runs:
        for group in _groups(prediction.kind, prediction.row):
            signed[group].append(prediction.error_of_speed)
    errors = [
        _errors(group, rows[group], np.abs(of).tolist(), bias=float(np.median(of)))
        for group, of in signed.items()
        if group[0] in KINDS
    ]
    pairs: dict[tuple[str, str, str], list[Pair]] = defaultdict(list)
    for pair in pairs_of(runs):
        for group in _groups(pair.kind, pair.first):
            pairs[group].append(pair)
    for group, members in pairs.items():
        right = [pair.ordered for pair in members if pair.ordered is not None]
        signs = sum(right) / len(right) if right else None
        distances = [abs(pair.relative_error) for pair in members]
        errors.append(_errors(group, len(members), distances, signs=signs, ordered=len(right)))
    return sorted(errors, key=lambda e: (KINDS.index(e.kind), e.source.startswith("all"), e.source))


def _errors(group: tuple[str, str, str], rows: int, of: Sequence[float], **more: Any) -> Errors:
    kind, source, role = group
    median, p90 = (float(percentile) for percentile in np.percentile(of, (50, 90)))
    return Errors(
        kind=kind, source=source, role=role, rows=rows, runs=len(of), median=median, p90=p90, **more
    )


def _generation(row: PublishedRow) -> str:
    """The generation of the kernels with which a row is priced, and whether products have 8 bits;
    empty for the only one of a device."""
    newer, words = cluster_of(row).device.newer, []
    if newer is not None:
        today = program_named(row.program).kernels >= newer.year
        words.append(f"kernels {'of' if today else 'before'} {newer.year}")
    return ", ".join(words + ["8 bits"] * (row.dtype in EIGHT_BIT))


def _groups(kind: str, row: PublishedRow) -> list[tuple[str, str, str]]:
    """The groups whose errors include the row's."""
    role = row.role.replace("_", " ")
    groups = [(row.source, role), (f"all {role} sources", role), ("all sources", "both")]
    groups += [(f"all on {row.device}", "both")]
    if kernels := _generation(row):
        groups += [(f"all on {row.device}, {kernels}", "both")]
    return [(kind, *group) for group in groups]


def oom_line(predictions: Sequence[Prediction]) -> str:
    """A line that says how often the model is right on whether a run fits into memory: for runs
    that were out of memory, and for runs that ran, which are all rows with a measured number."""
    out = [p.fits for p in predictions if p.row.unit == "yes/no" and p.row.value == "yes"]
    ran = [p.fits for p in predictions if p.row.unit != "yes/no" or p.row.value == "no"]
    first = f"{out.count(False)} of {len(out)} such rows predicted" if out else "no such rows"
    wrong = f"{ran.count(False)} of {len(ran)} rows that ran predicted not to fit"
    return f"out of memory: {first}; {wrong}"


def refusals(outcomes: Iterable[RowOutcome]) -> Counter[tuple[str, str]]:
    """The number of rows without a prediction per table and reason."""
    return Counter(
        (o.line.place.rpartition(":")[0], o.reason) for o in outcomes if o.prediction is None
    )
