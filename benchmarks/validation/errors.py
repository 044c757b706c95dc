"""How far the predictions of published rows are off in sample, per source and over all. How far
they are off without a row's source is in ``strangers``, and so is the error of a ratio."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import pandas as pd

from benchmarks.specification import DTYPES
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
    first: dict[tuple[Any, ...], Prediction] = {}
    for prediction in predictions:
        row, kind = prediction.row, prediction.row.measure.kind
        repeats[row.run, row.metric] += 1
        quantity = "speed" if kind in SPEEDS else row.metric
        first.setdefault((row.run, quantity, repeats[row.run, row.metric]), prediction)
    return [*first.values()]


KINDS = ("throughput", "memory")


def errors_of(predictions: Iterable[Prediction]) -> pd.DataFrame:
    """Absolute relative errors (``median``, ``p90``) and the median with its sign (``bias``, +: too
    fast, or too much memory), those of a run in speed, also where a time was published: per kind
    and source, per software generation and device, and over all sources. ``rows`` counts printed
    numbers; all else is over ``runs``. ``role`` is fitted, adjusted or held out; of totals over
    several: both."""
    counted = [prediction for prediction in predictions if prediction.kind in KINDS]
    first = set(map(id, first_of_runs(counted)))
    keys = ["kind", "source", "role"]
    lines = [
        (p.kind, *group, p.error_of_speed, id(p) in first)
        for p in counted
        for group in _groups(p.row)
    ]
    lines.sort(key=lambda line: (KINDS.index(line[0]), line[1].startswith("all"), line[1]))
    table = pd.DataFrame(lines, columns=[*keys, "error", "is_run"])
    table = table.astype({"error": float, "is_run": bool})
    runs = table.assign(size=table["error"].abs())[table["is_run"]].groupby(keys, sort=False)
    return pd.DataFrame(
        {
            "rows": table.groupby(keys, sort=False).size(),
            "runs": runs.size(),
            "median": runs["size"].median(),
            "p90": runs["size"].quantile(0.9),
            "bias": runs["error"].median(),
        }
    ).reset_index()


def _groups(row: PublishedRow) -> list[tuple[str, str]]:
    """The sources and roles whose errors include the row's: those of its device, too, and of the
    generation of kernels with which it is priced, and of products in 8 bits."""
    role, newer, words = row.role.replace("_", " "), cluster_of(row).device.newer, []
    if newer is not None:
        today = program_named(row.program).kernels >= newer.year
        words.append(f"kernels {'of' if today else 'before'} {newer.year}")
    words += ["8 bits"] * (row.dtype in DTYPES["fp8"])
    groups = [(row.source, role), (f"all {role} sources", role), ("all sources", "both")]
    groups += [(f"all on {row.device}", "both")]
    return groups + [(f"all on {row.device}, {', '.join(words)}", "both")] * bool(words)
