"""What ``zeropp validate`` prints: rows, and errors per source."""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullFormatter

from baselines.zeropp.contender import ZEROPP
from benchmarks.report import style
from benchmarks.validation.errors import (
    HEADER,
    Errors,
    first_of_runs,
    oom_line,
    predictions_of,
    refusals,
)
from benchmarks.validation.predict import RowOutcome
from benchmarks.validation.rows import COLUMNS


def row_line(outcome: RowOutcome) -> str:
    """A row's place, configuration, metric, measured and predicted number and error, or the reason
    why nothing was predicted."""
    cells = defaultdict(str, outcome.line.cells)
    words = [cells["model"][:14], f"{cells['num_gpus']}gpu"]
    words += [f"{name}{cells[name]}" for name in ("tp", "pp", "dp") if cells[name]]
    words += [f"mb{cells['micro_batch']}", f"b{cells['global_batch']}"]
    head = f"{outcome.line.place:30} {' '.join(words):46} {cells['metric'][:24]:24}"
    value = f"{cells['value'][:10]:>10} {cells['unit'][:12]:12}"
    if outcome.prediction is None:
        return f"{head} {value} not predicted: {outcome.reason}"
    return f"{head} {value} {outcome.prediction.text:>10} {outcome.prediction.relative_error:+8.1%}"


def summary(outcomes: Sequence[RowOutcome], errors: Sequence[Errors]) -> str:
    """The errors per source, how many rows were predicted, and why others were not."""
    predictions = predictions_of(outcomes)
    text = [
        "absolute relative error in sample, of speed, simulated against published; bias: + is too",
        "fast, or too much memory",
        "",
        HEADER,
        *(error.line() for error in errors),
        "",
        f"{len(predictions)} of {len(outcomes)} rows predicted",
    ]
    refused = []
    for outcome in outcomes:
        if outcome.reason.startswith("set apart"):
            text.append(f"{outcome.line.place}: {outcome.reason}")
        else:
            refused.append(outcome)
    for (table, reason), count in refusals(refused).most_common():
        text.append(f"refused: {count:4} of {table}: {reason}")
    return "\n".join([*text, oom_line(predictions), ZEROPP.caveat])


# What only people read stands in the published table, at the row's place.
SHOWN = tuple(name for name in COLUMNS if name not in ("url", "table", "assumed", "remark"))
ANSWERS = ("place", "predicted", "relative_error", "fits", "first_of_run", "reason")


def write(outcomes: Sequence[RowOutcome], errors: Sequence[Errors], out: Path) -> None:
    """Write the three files of a validation into ``out``.

    ``validation.csv`` has the columns that a price may depend on, then the row's place, the
    prediction, the relative error, whether the run is predicted to fit into memory, whether its run
    is counted by this row, and the reason of a refusal. ``errors.csv`` has one line per kind and
    source.
    ``validation.png`` shows predicted over published.
    """
    out.mkdir(parents=True, exist_ok=True)
    first = set(map(id, first_of_runs(predictions_of(outcomes))))
    with (out / "validation.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*SHOWN, *ANSWERS], extrasaction="ignore")
        writer.writeheader()
        for outcome in outcomes:
            writer.writerow(outcome.line.cells | _answer(outcome, first))
    with (out / "errors.csv").open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, [f.name for f in fields(Errors)])
        table.writeheader()
        table.writerows(error.cells() for error in errors)
    _scatter(outcomes, out / "validation.png")


def _answer(outcome: RowOutcome, first: set[int]) -> dict[str, str]:
    prediction, place = outcome.prediction, {"place": outcome.line.place}
    if prediction is None:
        return place | {"reason": outcome.reason}
    return place | {
        "predicted": prediction.text,
        "relative_error": f"{prediction.relative_error:.4f}",
        "fits": "yes" if prediction.fits else "no",
        "first_of_run": "yes" if id(prediction) in first else "no",
    }


def _scatter(outcomes: Sequence[RowOutcome], path: Path) -> None:
    """Draw predicted / published over published: one panel per kind and unit, one colour and
    marker per source, one dot per run."""
    panels: dict[str, dict[str, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    for prediction in first_of_runs(predictions_of(outcomes)):
        row = prediction.row
        if prediction.kind != "oom":
            quantity = {"time": "step time", "layer": "time of a block"}.get(
                row.measure.kind, prediction.kind
            )
            name = f"{quantity}, published [{row.unit}]"
            panels[name][row.source].append((row.measured, 1 + prediction.relative_error))
    names = sorted(panels) or ["nothing predicted"]
    sources = sorted({source for of_panel in panels.values() for source in of_panel})
    looks = {  # colour and marker: matplotlib's cycle has ten colours
        source: (f"C{number}", "o^sD"[number // 10 % 4]) for number, source in enumerate(sources)
    }
    figure, axes = style.panels(len(names))
    highest = max([2.0] + [y for of in panels.values() for ps in of.values() for _, y in ps])
    for axis, name in zip(axes, names, strict=True):
        for source, points in panels[name].items():
            x, y = zip(*points, strict=True)
            colour, marker = looks[source]
            axis.scatter(x, y, s=9, alpha=0.6, color=colour, marker=marker, label=source)
        axis.axhline(1.0, color="black", linewidth=0.8)
        axis.set(xscale="log", xlabel=name)
        axis.set_ylim(0.4, 1.05 * highest)
        low, high = axis.get_xlim()
        wide = high > 100 * low  # more ticks than powers of ten would overlap
        axis.xaxis.set_major_locator(LogLocator(subs=(1,) if wide else (1, 2, 5)))
        axis.xaxis.set_major_formatter("{x:,g}")
        axis.xaxis.set_minor_formatter(NullFormatter())
    for axis in axes[:: style.COLUMNS]:
        axis.set_ylabel("predicted / published")
    entries = {s: Line2D([], [], linestyle="", color=c, marker=m) for s, (c, m) in looks.items()}
    figure.legend(list(entries.values()), list(entries), loc="outside upper center", ncols=2)
    figure.savefig(path, dpi=150)
    plt.close(figure)
