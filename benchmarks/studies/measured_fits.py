"""How well a few measured runs on a cluster say how long its other runs take.

Of each published table below, which one cluster gave, three runs are drawn, the cluster's constants
are fitted to them (``benchmarks.measured.fit``), and the others are predicted; ``DRAWS`` times with
fixed seeds. It writes results/reference/measured_fits.csv, one row per cluster:

    python -m benchmarks.studies.measured_fits [FILE.csv ...]

``before`` are the errors of the same predictions with the preset's constants, and ``held`` is the
share of measured times within the intervals of 90 %.
"""

from __future__ import annotations

import csv
import random
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

import numpy as np

from benchmarks import CHECKOUT
from benchmarks.measured.fit import Priced, Run, fit
from benchmarks.records.record import write_atomically
from benchmarks.specification.command import CommandParser, command
from benchmarks.specification.progress import track
from benchmarks.studies.validation.cases import case_of, plan_of
from benchmarks.studies.validation.rows import PublishedRow, UnpredictableError, read_rows
from benchmarks.studies.validation.stated import measured_s

TABLES = (
    "internevo_a100_a800", "llm_foundry_fsdp", "simumax_b200", "bloom_tune_up",
)  # fmt: skip
RUNS, DRAWS = 3, 10
_SPEEDS = ("time", "rate", "flops", "utilization")


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
        if row is None or row.measure.kind not in _SPEEDS or row.run in seen:
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
    """The runs that were not drawn, predicted by those that were."""
    drawn = set(random.Random(seed).sample(range(len(runs)), RUNS))
    fitted = fit([runs[i] for i in sorted(drawn)])
    predicted = []
    for i, run in enumerate(runs):
        if i not in drawn:
            step_s, low, high = fitted.step_s(run.priced)
            before = np.log(run.priced.step_s() / run.measured_s)
            held = low <= run.measured_s <= high
            predicted.append(Predicted(np.log(step_s / run.measured_s), before, held))
    return predicted


COLUMNS = (
    "cluster", "runs", "predictions", "median", "p90", "before_median", "before_p90", "held",
)  # fmt: skip


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


@command
def main() -> int:
    """Write the table; see ``--help``."""
    parser = CommandParser(description="Fit three published runs per cluster, predict the others.")
    parser.add_argument("files", nargs="*", type=Path, help="other tables, printed only")
    files = parser.parse_args().files
    paths = files or [CHECKOUT / "results/published" / f"{name}.csv" for name in TABLES]
    rows, everything = [], []
    for path in paths:
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
    if not files:
        _write(rows)
    return 0


def _write(rows: Iterable[dict[str, object]]) -> None:
    text = StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_atomically(CHECKOUT / "results/reference/measured_fits.csv", text.getvalue())


if __name__ == "__main__":
    sys.exit(main())
