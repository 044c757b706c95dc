"""What ``zeropp validate`` prints: rows, and errors per source."""

from __future__ import annotations

import csv
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from baselines.zeropp.contender import ZEROPP
from benchmarks.report.evidence import errors_figure
from benchmarks.validation.errors import (
    first_of_runs,
    predictions_of,
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


def summary(outcomes: Sequence[RowOutcome], errors: pd.DataFrame) -> str:
    """The errors per source, how many rows were predicted, and why others were not."""
    predictions = predictions_of(outcomes)
    shares = dict.fromkeys(("median", "p90", "bias"), "{:+.1%}".format)
    named = errors.assign(source=errors["source"].str.slice(0, 30))
    shown = named.to_string(index=False, formatters=shares)
    text = [
        "absolute relative error in sample, of speed, simulated against published; bias: + is too",
        "fast, or too much memory",
        "",
        shown if len(errors) else "no run can be simulated",
        "",
        f"{len(predictions)} of {len(outcomes)} rows predicted",
    ]
    refused: Counter[tuple[str, str]] = Counter()
    for outcome in outcomes:
        if outcome.reason.startswith("set apart"):
            text.append(f"{outcome.line.place}: {outcome.reason}")
        elif outcome.prediction is None:
            refused[outcome.line.place.rpartition(":")[0], outcome.reason] += 1
    for (path, reason), count in refused.most_common():
        text.append(f"refused: {count:4} of {path}: {reason}")
    # Whether a run fits into memory: those that ran out of it, and all that ran.
    out = [p.fits for p in predictions if p.row.unit == "yes/no" and p.row.value == "yes"]
    ran = [p.fits for p in predictions if p.row.unit != "yes/no" or p.row.value == "no"]
    words = f"{out.count(False)} of {len(out)} such rows predicted" if out else "no such rows"
    wrong = f"{ran.count(False)} of {len(ran)} rows that ran predicted not to fit"
    return "\n".join([*text, f"out of memory: {words}; {wrong}", ZEROPP.caveat])


# What only people read stands in the published table, at the row's place.
SHOWN = tuple(name for name in COLUMNS if name not in ("url", "table", "assumed", "remark"))
ANSWERS = ("place", "predicted", "relative_error", "fits", "first_of_run", "reason")


def write(outcomes: Sequence[RowOutcome], errors: pd.DataFrame, out: Path) -> str:
    """Write the files of a validation into ``out``; returns their names.

    ``validation.csv`` has the columns that a price may depend on, then the row's place, the
    prediction, the relative error, whether the run is predicted to fit into memory, whether its run
    is counted by this row, and the reason of a refusal. ``errors.csv`` has one line per kind and
    source. ``validation.png`` shows the errors of all runs by source, if there are any.
    """
    out.mkdir(parents=True, exist_ok=True)
    runs = first_of_runs(predictions_of(outcomes))
    first = set(map(id, runs))
    with (out / "validation.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*SHOWN, *ANSWERS], extrasaction="ignore")
        writer.writeheader()
        for outcome in outcomes:
            writer.writerow(outcome.line.cells | _answer(outcome, first))
    errors.to_csv(out / "errors.csv", index=False, float_format="%.4f")
    distances = [
        {
            "source": run.row.source,
            "role": run.row.role.replace("_", " "),
            "quantity": "memory" if run.kind == "memory" else "speed",
            "error": run.error_of_speed,
        }
        for run in runs
        if run.kind != "oom"
    ]
    if not distances:
        return "validation.csv and errors.csv"
    errors_figure(pd.DataFrame(distances)).savefig(out / "validation.png", dpi=150)
    return "validation.csv, errors.csv and validation.png"


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
