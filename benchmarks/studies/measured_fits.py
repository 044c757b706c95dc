"""How well a few measured runs on a cluster say how long its other runs take.

Of each published table below, which one cluster gave, three runs are drawn, the cluster's constants
are fitted to them (``benchmarks.measured.fit``), and thirty others are predicted; five times, with
fixed seeds. It takes three minutes and writes results/reference/measured_fits.csv, one row per
cluster, and measured_causes.csv, how often a cause is named rightly:

    python -m benchmarks.studies.measured_fits

``before`` are the errors of the same predictions with the preset's constants, and ``held`` is the
share of measured times within the intervals of 90 %.
"""

from __future__ import annotations

import csv
import random
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from io import StringIO
from itertools import chain, permutations
from pathlib import Path

import numpy as np

from benchmarks import CHECKOUT
from benchmarks.measured.causes import explain
from benchmarks.measured.fit import Priced, Run, fit
from benchmarks.records.record import write_atomically
from benchmarks.specification.command import CommandParser, command
from benchmarks.specification.progress import track
from benchmarks.studies.validation.cases import EIGHT_BIT, case_of, plan_of
from benchmarks.studies.validation.rows import (
    SPEEDS,
    PublishedRow,
    UnpredictableError,
    read_rows,
    training_tables,
)
from benchmarks.studies.validation.stated import measured_s

TABLES = (
    "internevo_a100_a800", "llm_foundry_fsdp", "simumax_b200", "bloom_tune_up",
)  # fmt: skip
RUNS, PREDICTED, DRAWS = 3, 30, 5


@dataclass(frozen=True)
class Published:
    """A published run, priced and measured."""

    row: PublishedRow
    run: Run


def clusters(path: Path) -> dict[str, list[Published]]:
    """The runs of a table that have a price, by the cluster that they ran on."""
    groups: dict[str, list[Published]] = defaultdict(list)
    seen = set()
    for row in (line.row for line in read_rows(path)):
        if row is None or row.measure.kind not in SPEEDS or row.run in seen:
            continue
        try:
            case = case_of(row)
            priced = Priced(plan_of(case), case.cluster, case.program)
        except UnpredictableError:
            continue
        seen.add(row.run)
        name = f"{row.source}, {row.device}"
        groups[name].append(Published(row, Run(priced, measured_s(row, case.cluster.device))))
    return groups


@dataclass(frozen=True)
class Predicted:
    """ln(predicted / measured) of a step with fitted constants and with the preset's, and whether
    the measured time is within the interval."""

    error: float
    before: float
    held: bool


def predictions(runs: Sequence[Run], seed: int) -> list[Predicted]:
    """Runs that are predicted by three others."""
    drawn = random.Random(seed).sample(runs, min(len(runs), RUNS + PREDICTED))
    fitted = fit(drawn[:RUNS])
    predicted = []
    for run in drawn[RUNS:]:
        step_s, low, high = fitted.step_s(run.priced)
        before = np.log(run.priced.step_s() / run.measured_s)
        held = low <= run.measured_s <= high
        predicted.append(Predicted(np.log(step_s / run.measured_s), before, held))
    return predicted


def row_of(cluster: str, runs: int, predicted: Sequence[Predicted]) -> dict[str, object]:
    """One row of the table; errors in percent."""
    errors = 100 * np.expm1(np.abs([p.error for p in predicted]))
    before = 100 * np.expm1(np.abs([p.before for p in predicted]))
    return {
        "cluster": cluster,
        "runs": runs,
        "predictions": len(predicted),
        "median": f"{np.median(errors):.1f}",
        "p90": f"{np.quantile(errors, 0.9):.1f}",
        "before_median": f"{np.median(before):.1f}",
        "before_p90": f"{np.quantile(before, 0.9):.1f}",
        "held": f"{np.mean([p.held for p in predicted]):.2f}",
    }


# The cause that a setting belongs to.
_CAUSES: dict[str, Callable[[PublishedRow], object]] = {
    "recomputation": lambda row: (row.recompute, row.recompute_blocks),
    "overlap": lambda row: (row.overlap_tensor, row.overlap_gradients),
    "precision": lambda row: row.dtype in EIGHT_BIT,
    "network": lambda row: row.nic_gbit_s,
    "age of the software": lambda row: (row.compiled, row.attention),
}
_SETTINGS = (
    "recompute", "recompute_blocks", "overlap_tensor", "overlap_gradients", "dtype", "nic_gbit_s",
    "compiled", "attention", "table",
)  # fmt: skip
_LEAST = 0.05  # of the logarithm of two runs' times: less is within what is not known


def pairs(runs: Iterable[Published]) -> Iterator[tuple[str, Run]]:
    """(the cause of the difference, the one run's price with what was measured of the other), of
    all pairs: the simulator's own error is in them, as it is where somebody asks. Only precisions
    may stand in two tables of a source, whose titles say what else differs."""
    groups = defaultdict(list)
    for published in runs:
        row = published.row
        same = [(name, cell) for name, cell in row.run if name not in _SETTINGS]
        groups[row.metric, tuple(same)].append(published)
    for members in groups.values():
        for one, other in permutations(members, 2):
            differing = [c for c, of in _CAUSES.items() if of(one.row) != of(other.row)]
            alone = len(differing) == 1
            alone &= one.row.table == other.row.table or differing == ["precision"]
            ratio = other.run.measured_s / one.run.measured_s
            if alone and abs(np.log(ratio)) > _LEAST:
                yield differing[0], Run(one.run.priced, other.run.measured_s)


def causes_named(every: Iterable[tuple[str, Run]]) -> list[dict[str, object]]:
    """One row per cause: how many pairs differ in it, and how often it was named."""
    named = defaultdict(list)
    for cause, run in every:
        first = explain([run])[0]
        named[cause].append((first.cause == cause, first.probability > 0.5))
    named["all"] = [pair for of in named.values() for pair in of]
    rows: list[dict[str, object]] = []
    for cause, of in named.items():
        sure = [right for right, certain in of if certain]
        right = f"{np.mean([right for right, _ in of]):.2f}"
        rows.append({"cause": cause, "pairs": len(of), "right": right, "sure": len(sure)})
        rows[-1]["sure_right"] = f"{np.mean(sure):.2f}" if sure else ""
    return rows


@command
def main() -> int:
    """Write the table; see ``--help``."""
    description = "Fit three published runs per cluster, predict the others."
    CommandParser(description=description).parse_args()
    rows, everything = [], []
    for name in TABLES:
        path = CHECKOUT / "results" / "published" / f"{name}.csv"
        for cluster, published in clusters(path).items():
            runs = [p.run for p in published]
            if len(runs) <= RUNS:
                continue
            draws = track(range(DRAWS), DRAWS, cluster)
            predicted = [p for seed in draws for p in predictions(runs, seed)]
            rows.append(row_of(cluster, len(runs), predicted))
            everything += predicted
            print(rows[-1], flush=True)
    rows.append(row_of("all", sum(int(str(row["runs"])) for row in rows), everything))
    print(rows[-1])
    every = (chain(*clusters(path).values()) for path in training_tables())
    named = causes_named(pair for published in every for pair in pairs(published))
    print(*named, sep="\n")
    _write("measured_fits.csv", rows)
    _write("measured_causes.csv", named)
    return 0


def _write(name: str, rows: Sequence[dict[str, object]]) -> None:
    text = StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_atomically(CHECKOUT / "results" / "reference" / name, text.getvalue())


if __name__ == "__main__":
    sys.exit(main())
