"""What ``benchmarks.validate`` prints and writes: rows, errors by source, pairs, CSV, scatter."""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullFormatter

from benchmarks.report import style
from benchmarks.report.published import FITTED
from benchmarks.studies.validation.pairs import Pair
from benchmarks.studies.validation.predict import Prediction

ANSWERS = ("predicted", "relative_error", "reason")


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


@dataclass(frozen=True)
class Errors:
    """Absolute relative errors of one kind (throughput, memory, ratio of two rows) and source."""

    kind: str
    source: str
    role: str  # fitted, held out, or both for "all sources"
    rows: int
    median: float
    p90: float

    def line(self) -> str:
        """As it is printed."""
        name = self.source if self.source.startswith("all") else f"{self.source} ({self.role})"
        numbers = f"n={self.rows:5}  median {self.median:6.1%}  p90 {self.p90:6.1%}"
        return f"{self.kind:10} {name[:72]:72} {numbers}"


def errors_of(outcomes: Sequence[Outcome], pairs: Sequence[Pair]) -> list[Errors]:
    """Median and 90th percentile by kind and source, and over all; ratios of pairs last."""
    found = [
        (o.prediction.kind, o.row.get("source", ""), o.prediction.relative_error)
        for o in outcomes
        if o.prediction is not None and o.prediction.kind != "oom"
    ]
    found += [("ratio", pair.source, pair.relative_error) for pair in pairs]
    groups: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for kind, source, error in found:
        role = "fitted" if any(word in source for word in FITTED) else "held out"
        groups[kind, source, role].append(abs(error))
        groups[kind, f"all {role} sources", role].append(abs(error))
        groups[kind, "all sources", "both"].append(abs(error))
    return [
        Errors(*key, len(errors), *(float(p) for p in np.percentile(errors, (50, 90))))
        for key, errors in sorted(groups.items(), key=_order)
    ]


def oom_line(outcomes: Sequence[Outcome]) -> str:
    """How often the model's word on memory agrees with what happened: of runs that were out of
    memory, and of all that ran (every row with a number did)."""
    found = [o.prediction for o in outcomes if o.prediction is not None]
    out = [p for p in found if p.kind == "oom" and (p.text == "OOM") == (p.relative_error == 0)]
    ran = [p for p in found if p not in out]
    right, wrong = sum(not p.fits for p in out), sum(not p.fits for p in ran)
    first = f"{right} of {len(out)} such rows predicted" if out else "no such rows"
    return f"out of memory: {first}; {wrong} of {len(ran)} rows that ran predicted not to fit"


def _order(item: tuple[tuple[str, str, str], list[float]]) -> tuple[int, bool, str]:
    (kind, source, _), _ = item
    return ("throughput", "memory", "ratio").index(kind), source.startswith("all"), source


def write(outcomes: Sequence[Outcome], errors: Sequence[Errors], out: Path) -> None:
    """``validation.csv`` (every input column, then predicted, relative_error, reason; a row a
    row), ``errors.csv`` (a row a kind and source) and ``validation.png``."""
    out.mkdir(parents=True, exist_ok=True)
    columns = list(dict.fromkeys(key for outcome in outcomes for key in outcome.row))
    with (out / "validation.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*columns, *ANSWERS])
        writer.writeheader()
        for outcome in outcomes:
            writer.writerow(outcome.row | _answer(outcome))
    with (out / "errors.csv").open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, [f.name for f in fields(Errors)])
        table.writeheader()
        table.writerows(
            asdict(e) | {"median": f"{e.median:.4f}", "p90": f"{e.p90:.4f}"} for e in errors
        )
    _scatter(outcomes, out / "validation.png")


def _answer(outcome: Outcome) -> dict[str, str]:
    prediction = outcome.prediction
    if prediction is None:
        return {"predicted": "", "relative_error": "", "reason": outcome.reason}
    error = f"{prediction.relative_error:.4f}"
    return {"predicted": prediction.text, "relative_error": error, "reason": ""}


def _scatter(outcomes: Sequence[Outcome], path: Path) -> None:
    """Predicted over measured, against measured, a panel a kind and unit, a colour a source."""
    panels: dict[str, dict[str, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    for outcome in outcomes:
        prediction = outcome.prediction
        if prediction is None or prediction.kind == "oom" or prediction.relative_error <= -1:
            continue
        ratio = 1 + prediction.relative_error
        unit = f"{prediction.kind}, measured [{outcome.row.get('unit', '')}]"
        panels[unit][outcome.row.get("source", "")].append((prediction.value / ratio, ratio))
    names = sorted(panels, reverse=True) or ["nothing predicted"]
    sources = sorted({source for of_panel in panels.values() for source in of_panel})
    shades = {source: f"C{number}" for number, source in enumerate(sources)}
    figure, axes = style.panels(len(names))
    highest = max([2.0] + [y for of in panels.values() for ps in of.values() for _, y in ps])
    for axis, name in zip(axes, names, strict=True):
        for source, points in panels[name].items():
            x, y = zip(*points, strict=True)
            axis.scatter(x, y, s=9, alpha=0.6, color=shades[source], label=source)
        axis.axhline(1.0, color="black", linewidth=0.8)
        axis.set(xscale="log", xlabel=name, ylabel="predicted / measured")
        axis.set_ylim(0.4, 1.05 * highest)
        axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.xaxis.set_major_formatter("{x:,g}")
        axis.xaxis.set_minor_formatter(NullFormatter())
    entries = {s: Line2D([], [], color=c, marker="o", linestyle="") for s, c in shades.items()}
    figure.legend(list(entries.values()), list(entries), loc="outside upper center", ncols=2)
    figure.savefig(path, dpi=150)
    plt.close(figure)
