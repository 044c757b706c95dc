"""How far the predictions of published rows are off in sample, per source and over all. How far
they are off without a row's source is in ``strangers``, and so is the error of a ratio."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from benchmarks.validation.cases import EIGHT_BIT
from benchmarks.validation.predict import Prediction, RowOutcome
from benchmarks.validation.rows import SPEEDS, PublishedRow
from benchmarks.validation.stated import cluster_of
from zeropp.price.programs import program_named


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
    """The absolute relative errors of one source and kind (throughput or memory), those of a run in
    speed, also where a time was published. ``rows`` counts printed numbers; all else is over
    ``runs``."""

    kind: str
    source: str
    role: str  # fitted, adjusted or held out; of totals over several: both
    rows: int
    runs: int
    median: float
    p90: float
    bias: float  # the median with its sign: + is too fast, or too much memory

    def cells(self) -> dict[str, Any]:
        """The line of ``errors.csv``."""
        return asdict(self) | {n: f"{getattr(self, n):.4f}" for n in ("median", "p90", "bias")}

    def line(self) -> str:
        """The line that is printed under ``HEADER``, in 100 columns."""
        source = self.source if len(self.source) <= 30 else f"{self.source[:29]}…"
        return (
            f"{self.kind:10}  {source:30}  {self.role:8}  {self.rows:4}  {self.runs:4}  "
            f"{self.median:6.1%}  {self.p90:6.1%}  {self.bias:>+6.1%}"
        )


HEADER = f"{'kind':10}  {'source':30}  {'role':8}  rows  runs  median     p90    bias"


KINDS = ("throughput", "memory")


def errors_of(predictions: Sequence[Prediction]) -> list[Errors]:
    """Errors per kind and source, per software generation and device, and over all sources."""
    rows: Counter[tuple[str, str, str]] = Counter()
    signed: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for prediction in predictions:
        rows.update(_groups(prediction.kind, prediction.row))
    for prediction in first_of_runs(predictions):
        for group in _groups(prediction.kind, prediction.row):
            signed[group].append(prediction.error_of_speed)
    errors = []
    for group, of in signed.items():
        if group[0] not in KINDS:
            continue
        named = dict(zip(("kind", "source", "role"), group, strict=True))
        median, p90 = map(float, np.percentile(np.abs(of), (50, 90)))
        bias = float(np.median(of))
        errors.append(
            Errors(**named, rows=rows[group], runs=len(of), median=median, p90=p90, bias=bias)
        )
    return sorted(errors, key=lambda e: (KINDS.index(e.kind), e.source.startswith("all"), e.source))


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
