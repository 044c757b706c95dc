"""Hold the simulator against published measurements.

``python -m benchmarks.validate [FILES...] [--cluster NAME] [--out DIR]``: without files, all of
``results/published``. One simulator prices everything: ``zeropp.sim.simulate``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.validate.pairs import pairs_of
from benchmarks.validate.predict import predict
from benchmarks.validate.report import (
    Errors,
    Outcome,
    errors_of,
    oom_line,
    row_line,
    write,
)
from benchmarks.validate.rows import UnpredictableError, read_rows

PUBLISHED = Path(__file__).resolve().parents[2] / "results" / "published"
UNMEASURED = (
    "No published measurement exists of PP x ZeRO-3 with gathers a unit (ZeroPP's layout): its "
    "price is the sum of parts that are held here (kernels, pipeline, FSDP's gathers)."
)


def outcome_of(row: dict[str, str], cluster: str | None) -> Outcome:
    """Predict a row, or say why not."""
    try:
        return Outcome(row, predict(row, cluster), "")
    except UnpredictableError as error:
        return Outcome(row, None, str(error))
    except (ValueError, ArithmeticError, LookupError) as error:
        return Outcome(row, None, f"not understood: {type(error).__name__}: {error}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the comparison; 0 when it ran, 2 where a file cannot be read."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.validate", description=__doc__)
    parser.add_argument("files", nargs="*", type=Path, help="CSV files of the published schema")
    parser.add_argument("--cluster", help="price every row on this cluster of conf/cluster")
    parser.add_argument("--out", type=Path, help="folder for validation.csv and validation.png")
    options = parser.parse_args(arguments)
    files = options.files or sorted(PUBLISHED.glob("*.csv"))
    missing = [str(path) for path in files if not path.is_file()]
    if missing:
        print(f"no such file: {', '.join(missing)}", file=sys.stderr)
        return 2
    outcomes = []
    for path in files:
        rows = read_rows(path)
        if not rows:
            print(f"{path.name}: no training rows (columns metric and n_gpus), skipped")
        for row in rows:
            outcomes.append(outcome_of(row, options.cluster))
            print(row_line(outcomes[-1]))
    errors = _summarise(outcomes)
    if options.out is not None:
        write(outcomes, errors, options.out)
        print(f"wrote {options.out}/validation.csv, errors.csv and validation.png")
    return 0


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
