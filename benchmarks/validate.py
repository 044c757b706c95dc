"""Hold the simulator against published measurements.

One simulator prices everything: zeropp.sim.simulator.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from itertools import chain
from pathlib import Path

from benchmarks import CHECKOUT
from benchmarks.records.metrics import UNMEASURED
from benchmarks.records.record import check_writable
from benchmarks.specification.command import CommandParser, run_command
from benchmarks.specification.compose import preset
from benchmarks.specification.run_spec import SpecError
from benchmarks.studies.validation.errors import (
    Errors,
    Outcome,
    errors_of,
    oom_line,
    row_line,
    write,
)
from benchmarks.studies.validation.pairs import pairs_of
from benchmarks.studies.validation.predict import predict
from benchmarks.studies.validation.rows import NEEDED, UnpredictableError, read_rows
from zeropp.cluster import Cluster

PUBLISHED = CHECKOUT / "results" / "published"


def outcome_of(row: dict[str, str], cluster: str | None) -> Outcome:
    """Predict a row, or say why not."""
    try:
        return Outcome(row, predict(row, cluster), "")
    except UnpredictableError as error:
        return Outcome(row, None, str(error))
    except (ValueError, ArithmeticError, LookupError) as error:
        return Outcome(row, None, f"not understood: {type(error).__name__}: {error}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the comparison; 0 when it ran, 2 where there is nothing to run it on."""
    return run_command(partial(_validate, arguments))


def _validate(arguments: Sequence[str] | None) -> int:
    parser = CommandParser(
        prog="python -m benchmarks.validate",
        description="Hold the simulator against published measurements: a line a row with both "
        "numbers, then the errors by source.",
        epilog="example: python -m benchmarks.validate results/published/vtrain_a100.csv",
    )
    parser.add_argument("files", nargs="*", type=Path, help="CSV files (all of results/published)")
    parser.add_argument(
        "--cluster", metavar="NAME", help="price every row on this cluster of conf/cluster"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="folder for validation.csv, errors.csv and validation.png",
    )
    options = parser.parse_args(arguments)
    if options.cluster is not None:
        preset("cluster", options.cluster, Cluster)
    if options.out is not None:
        check_writable("--out", options.out)
    tables = _tables(options.files or sorted(PUBLISHED.glob("*.csv")))
    outcomes = []
    for row in chain.from_iterable(tables):
        outcomes.append(outcome_of(row, options.cluster))
        print(row_line(outcomes[-1]))
    errors = _summarise(outcomes)
    if options.out is not None:
        write(outcomes, errors, options.out)
        print(f"wrote {options.out}/validation.csv, errors.csv and validation.png")
    return 0


def _tables(files: Sequence[Path]) -> list[list[dict[str, str]]]:
    """The rows of every file; those of other tables are named and skipped."""
    tables = [read_rows(path) for path in files]
    without = [path for path, rows in zip(files, tables, strict=True) if not rows]
    if len(without) == len(files):
        names = ", ".join(map(str, files))
        raise SpecError(f"{names}: no training rows (columns {', '.join(NEEDED)} and more)")
    for path in without:
        print(f"{path.name}: no training rows (columns {', '.join(NEEDED)}), skipped")
    return tables


def _summarise(outcomes: Sequence[Outcome]) -> list[Errors]:
    pairs = pairs_of([o.row for o in outcomes], [o.prediction for o in outcomes])
    errors = errors_of(outcomes, pairs)
    print(
        "\nabsolute relative error (ratio: of pairs that differ in schedule or parallelism alone)"
    )
    print("\n".join(e.line() for e in errors))
    print(oom_line(outcomes))
    predicted = sum(1 for o in outcomes if o.prediction)
    print(f"{predicted} of {len(outcomes)} rows predicted\n{UNMEASURED}")
    return errors


if __name__ == "__main__":
    sys.exit(main())
