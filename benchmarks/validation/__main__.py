"""Compares the simulator with published measurements.

The simulator is the same that the tuner, the launcher and the verdict use: zeropp.price.simulator.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.specification import SpecError
from benchmarks.specification.command import CommandParser, check_writable, run_command


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the comparison; returns 0, or 2 if there are no rows to compare with."""
    return run_command(partial(_validate, arguments))


def _validate(arguments: Sequence[str] | None) -> int:
    options = _parser().parse_args(arguments)
    # These imports take longer than it takes to answer --help.
    from benchmarks.specification.progress import track
    from benchmarks.specification.reading import preset
    from benchmarks.validation.errors import errors_of, predictions_of
    from benchmarks.validation.predict import outcome_of
    from benchmarks.validation.rows import read_rows, training_tables
    from benchmarks.validation.texts import row_line, summary
    from zeropp.price.cluster import Cluster

    if options.cluster is not None:
        preset("cluster", options.cluster, Cluster)
    if options.out is not None:
        check_writable("--out", options.out)
    lines = [line for path in options.files or training_tables() for line in read_rows(path)]
    if not lines:
        raise SpecError(f"{', '.join(map(str, options.files))}: no rows")
    outcomes = [outcome_of(line, options.cluster) for line in track(lines, len(lines), "rows")]
    errors = errors_of(predictions_of(outcomes))
    if options.verbose:
        print("\n".join(row_line(outcome) for outcome in outcomes), end="\n\n")
    print(summary(outcomes, errors))
    if options.out is not None:
        from benchmarks.validation.texts import write  # matplotlib only now

        print(f"wrote {options.out}/{write(outcomes, errors, options.out)}")
    return 0


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="zeropp validate",
        description="Compare the simulator with published measurements: errors per source, and "
        "refused rows with the reason. docs/published_rows.md has the columns of a table.",
        epilog="example: zeropp validate -v results/published/vtrain_a100.csv",
    )
    parser.add_argument("files", nargs="*", type=Path, help="CSV files (all of results/published)")
    parser.add_argument("-v", "--verbose", action="store_true", help="also print every row")
    parser.add_argument(
        "--cluster", metavar="NAME", help="simulate every row on this cluster of conf/cluster"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="folder for validation.csv, errors.csv and validation.png",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
