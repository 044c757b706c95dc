"""What ``benchmarks.validate`` prints and writes: rows, errors by source, pairs, CSV, scatter."""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np

from benchmarks.validate.pairs import Pair
from benchmarks.validate.predict import Prediction

ANSWERS = ("predicted", "relative_error", "reason")

# Constants are fitted on these sources; every other one is held out.
FITTED = ("vTrain", "LiBai", "MosaicML", "2205.05198")


@dataclass(frozen=True)
class Outcome:
    """A row with its prediction, or the reason why there is none."""

    row: dict[str, str]
    prediction: Prediction | None
    reason: str


def configuration(row: dict[str, str]) -> str:
    """A row's degrees and batch in one word a knob."""
    words = [f"{row.get('n_gpus', '')}gpu"]
    words += [f"{k}{row[k]}" for k in ("tp", "pp", "vp", "dp") if row.get(k)]
    words += [f"mb{row.get('micro_batch', '')}", f"gb{row.get('global_batch', '')}"]
    return " ".join(words)


def row_line(outcome: Outcome) -> str:
    """Measured, predicted and error of one row; or the reason."""
    row = outcome.row
    head = f"{row.get('source', '')[:28]:28} {row.get('model', '')[:14]:14} "
    head += f"{configuration(row):38} {row.get('metric', '')[:20]:20}"
    value = f"{row.get('value', '')[:10]:>10} {row.get('unit', '')[:10]:10}"
    if outcome.prediction is None:
        return f"{head} {value} not predicted: {outcome.reason}"
    error = f"{outcome.prediction.relative_error:+8.1%}"
    return f"{head} {value} {outcome.prediction.text:>10} {error}"


def error_lines(outcomes: Sequence[Outcome]) -> list[str]:
    """Median and 90th percentile of the absolute error by source and kind, and over all."""
    groups: dict[tuple[str, str], list[float]] = defaultdict(list)
    for outcome in outcomes:
        prediction = outcome.prediction
        if prediction is None or prediction.kind == "oom":
            continue
        source = outcome.row.get("source", "")
        role = "fitted" if any(word in source for word in FITTED) else "held out"
        for name in (f"{source} ({role})", f"all {role} sources", "all sources"):
            groups[prediction.kind, name].append(abs(prediction.relative_error))
    return [
        f"{kind:10} {name[:64]:64} {_summary(errors)}"
        for (kind, name), errors in sorted(groups.items(), key=_order)
    ]


def oom_line(outcomes: Sequence[Outcome]) -> str:
    """How many rows that ran out of memory were predicted to."""
    rows = [o.prediction for o in outcomes if o.prediction and o.prediction.kind == "oom"]
    right = sum(1 for prediction in rows if prediction.text == "OOM")
    return f"out of memory: {right} of {len(rows)} such rows predicted"


def pair_lines(pairs: Sequence[Pair]) -> list[str]:
    """Error of the ratio by source, and over all."""
    groups: dict[str, list[float]] = defaultdict(list)
    for pair in pairs:
        groups[pair.source].append(abs(pair.relative_error))
        groups["all sources"].append(abs(pair.relative_error))
    return [f"{'ratio':10} {name[:64]:64} {_summary(errors)}" for name, errors in groups.items()]


def _summary(errors: Sequence[float]) -> str:
    median, high = np.percentile(errors, (50, 90))
    return f"n={len(errors):5}  median {median:6.1%}  p90 {high:6.1%}"


def _order(item: tuple[tuple[str, str], list[float]]) -> tuple[bool, str, bool, str]:
    (kind, name), _ = item
    return kind != "throughput", kind, name.startswith("all"), name


def write(outcomes: Sequence[Outcome], out: Path) -> None:
    """``validation.csv`` (every input column, then predicted, relative_error, reason; a row a
    row) and ``validation.png``."""
    out.mkdir(parents=True, exist_ok=True)
    columns = list(dict.fromkeys(key for outcome in outcomes for key in outcome.row))
    with (out / "validation.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*columns, *ANSWERS])
        writer.writeheader()
        for outcome in outcomes:
            writer.writerow(outcome.row | _answer(outcome))
    _scatter(outcomes, out / "validation.png")


def _answer(outcome: Outcome) -> dict[str, str]:
    prediction = outcome.prediction
    if prediction is None:
        return {"predicted": "", "relative_error": "", "reason": outcome.reason}
    error = f"{prediction.relative_error:.4f}"
    return {"predicted": prediction.text, "relative_error": error, "reason": ""}


def _scatter(outcomes: Sequence[Outcome], path: Path) -> None:
    """Predicted over measured, against measured, a panel a kind and unit."""
    panels: dict[str, dict[str, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    for outcome in outcomes:
        prediction = outcome.prediction
        if prediction is None or prediction.kind == "oom" or prediction.relative_error <= -1:
            continue
        ratio = 1 + prediction.relative_error
        source = outcome.row.get("source", "")
        unit = f"{prediction.kind}, {outcome.row.get('unit', '')}"
        panels[unit][source].append((prediction.value / ratio, ratio))
    names = list(panels) or ["nothing predicted"]
    columns = min(3, len(names))
    lines = -(-len(names) // columns)
    figure, axes = plt.subplots(lines, columns, figsize=(5 * columns, 3.6 * lines), squeeze=False)
    for axis, name in zip(axes.flat, names, strict=False):
        for source, points in panels.get(name, {}).items():
            x, y = zip(*points, strict=True)
            axis.scatter(x, y, s=9, alpha=0.6, label=source[:32])
        axis.axhline(1.0, color="black", linewidth=0.8)
        axis.set(xscale="log", xlabel=f"measured ({name})", ylabel="predicted / measured")
        low, high = axis.get_ylim()
        axis.set_ylim(min(0.4, low), max(1.8, high))
        axis.legend(fontsize=6)
    for spare in list(axes.flat)[len(names) :]:
        spare.set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)
