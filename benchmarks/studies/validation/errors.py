"""The results of validation: predictions, errors per source and kind, refusals per reason."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from benchmarks.studies.validation.predict import Prediction, predict
from benchmarks.studies.validation.reader import Line
from benchmarks.studies.validation.rows import PublishedRow, UnpredictableError
from benchmarks.studies.validation.run_pairs import pairs_of

KINDS = ("throughput", "memory", "ratio")


@dataclass(frozen=True)
class Outcome:
    """A line of a table with its prediction, or with the reason why there is none."""

    line: Line
    prediction: Prediction | None
    reason: str = ""


@dataclass(frozen=True)
class Predicted:
    """A row with its prediction."""

    row: PublishedRow
    prediction: Prediction


def outcome_of(line: Line, cluster: str | None = None) -> Outcome:
    """Predict a line, on the preset ``cluster`` if one is given, or say why that is impossible."""
    if line.row is None:
        return Outcome(line, None, line.refusal)
    try:
        return Outcome(line, predict(line.row, cluster))
    except UnpredictableError as error:
        return Outcome(line, None, str(error))


def predicted_rows(outcomes: Iterable[Outcome]) -> list[Predicted]:
    """The rows that have a prediction."""
    return [
        Predicted(o.line.row, o.prediction)
        for o in outcomes
        if o.line.row is not None and o.prediction is not None
    ]


def first_of_runs(predicted: Iterable[Predicted]) -> list[Predicted]:
    """One row per run and quantity. A run whose speed is printed in three units counts once, by its
    first row. Equal rows with the same metric are repeated runs, and all of them count."""
    repeats: Counter[tuple[Any, ...]] = Counter()
    seen: set[tuple[Any, ...]] = set()
    first = []
    for one in predicted:
        row, kind = one.row, one.row.measure.kind
        speed = kind in ("time", "rate", "flops", "utilization")
        repeats[row.run, row.metric] += 1
        key = (row.run, "speed" if speed else row.metric, repeats[row.run, row.metric])
        if key not in seen:
            seen.add(key)
            first.append(one)
    return first


@dataclass(frozen=True, kw_only=True)
class Errors:
    """The absolute relative errors of one source and kind (throughput, memory, or the ratio of two
    runs). ``rows`` counts printed numbers; ``median`` and ``p90`` are over ``runs``."""

    kind: str
    source: str
    role: str  # fitted, adjusted, held out, computed; of totals: both, or any with computed
    rows: int
    runs: int
    median: float
    p90: float

    def cells(self) -> dict[str, Any]:
        """The line of ``errors.csv``."""
        return asdict(self) | {"median": f"{self.median:.4f}", "p90": f"{self.p90:.4f}"}

    def line(self) -> str:
        """The line that is printed under ``HEADER``, in 80 columns."""
        source = self.source if len(self.source) <= 30 else f"{self.source[:29]}…"
        return (
            f"{self.kind:10}  {source:30}  {self.role:8}  {self.rows:4}  {self.runs:4}  "
            f"{self.median:6.1%}  {self.p90:6.1%}"
        )


HEADER = f"{'kind':10}  {'source':30}  {'role':8}  rows  runs  median     p90"


def errors_of(predicted: Sequence[Predicted]) -> list[Errors]:
    """Median and 90th percentile per kind and source, and over all sources; ratios come last."""
    rows: Counter[tuple[str, str, str]] = Counter()
    errors: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for one in predicted:
        rows.update(_groups(one.prediction.kind, one.row))
    runs = first_of_runs(predicted)
    for one in runs:
        for group in _groups(one.prediction.kind, one.row):
            errors[group].append(abs(one.prediction.relative_error))
    for pair in pairs_of([one.row for one in runs], [one.prediction for one in runs]):
        groups = _groups("ratio", runs[pair.first].row)
        rows.update(groups)
        for group in groups:
            errors[group].append(abs(pair.relative_error))
    found = [_errors(group, rows[group], of) for group, of in errors.items() if group[0] in KINDS]
    return sorted(found, key=lambda e: (KINDS.index(e.kind), e.source.startswith("all"), e.source))


def _errors(group: tuple[str, str, str], rows: int, of: Sequence[float]) -> Errors:
    kind, source, role = group
    median, p90 = (float(percentile) for percentile in np.percentile(of, (50, 90)))
    return Errors(
        kind=kind, source=source, role=role, rows=rows, runs=len(of), median=median, p90=p90
    )


def _groups(kind: str, row: PublishedRow) -> list[tuple[str, str, str]]:
    """The groups whose errors include the row's. Numbers that their source computed and did not
    measure count for their source, and in one total beside all measured ones."""
    role = row.role.replace("_", " ")
    groups = [(row.source, role), ("all sources, computed numbers too", "any")]
    if row.role != "computed":
        groups += [(f"all {role} sources", role), ("all sources", "both")]
        groups += [(f"all on {row.device}", "both")]
    return [(kind, *group) for group in groups]


def oom_line(predicted: Sequence[Predicted]) -> str:
    """A line that says how often the model is right on whether a run fits into memory: for runs
    that were out of memory, and for runs that ran, which are all rows with a measured number."""
    runs = [p for p in predicted if p.row.role != "computed"]
    out = [p.prediction for p in runs if p.row.unit == "yes/no" and p.row.value == "yes"]
    ran = [p.prediction for p in runs if p.row.unit != "yes/no" or p.row.value == "no"]
    right, wrong = sum(not p.fits for p in out), sum(not p.fits for p in ran)
    first = f"{right} of {len(out)} such rows predicted" if out else "no such rows"
    return f"out of memory: {first}; {wrong} of {len(ran)} rows that ran predicted not to fit"


def refusals(outcomes: Iterable[Outcome]) -> Counter[tuple[str, str]]:
    """The number of rows without a prediction per table and reason."""
    return Counter(
        (o.line.place.rpartition(":")[0], o.reason) for o in outcomes if o.prediction is None
    )
