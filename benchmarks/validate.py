"""Compares the simulator with published measurements.

The simulator is the same that the tuner, the launcher and the verdict use: zeropp.sim.simulator.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.specification.command import CommandParser, check_writable, run_command
from benchmarks.specification.compose import preset
from benchmarks.specification.progress import told
from benchmarks.specification.run_spec import SpecError
from benchmarks.studies.validation.errors import (
    HEADER,
    Errors,
    Outcome,
    errors_of,
    oom_line,
    outcome_of,
    predicted_rows,
    refusals,
)
from benchmarks.studies.validation.reader import Line, read_rows, training_tables
from zeropp.cluster import Cluster
from zeropp.contender.contender import ZEROPP


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the comparison; returns 0, or 2 if there are no rows to compare with."""
    return run_command(partial(_validate, arguments))


def _validate(arguments: Sequence[str] | None) -> int:
    options = _parser().parse_args(arguments)
    if options.cluster is not None:
        preset("cluster", options.cluster, Cluster)
    if options.out is not None:
        check_writable("--out", options.out)
    lines = [line for path in options.files or training_tables() for line in read_rows(path)]
    if not lines:
        raise SpecError(f"{', '.join(map(str, options.files))}: no rows")
    outcomes = [outcome_of(line, options.cluster) for line in told(lines, len(lines), "rows")]
    errors = errors_of(predicted_rows(outcomes))
    if options.verbose:
        print("\n".join(_row_line(outcome) for outcome in outcomes), end="\n\n")
    print(_summary(outcomes, errors))
    if options.out is not None:
        from benchmarks.studies.validation.write import write  # matplotlib only now

        write(outcomes, errors, options.out)
        print(f"wrote {options.out}/validation.csv, errors.csv and validation.png")
    return 0


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="python -m benchmarks.validate",
        description="Compare the simulator with published measurements: errors per source, and "
        "refused rows with the reason. docs/published_rows.md has the columns of a table.",
        epilog="example: python -m benchmarks.validate -v results/published/vtrain_a100.csv",
    )
    parser.add_argument("files", nargs="*", type=Path, help="CSV files (all of results/published)")
    parser.add_argument("-v", "--verbose", action="store_true", help="also print every row")
    parser.add_argument(
        "--cluster", metavar="NAME", help="price every row on this cluster of conf/cluster"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="folder for validation.csv, errors.csv and validation.png",
    )
    return parser


def _row_line(outcome: Outcome) -> str:
    """A row's place, configuration, metric, measured and predicted number and error, or the reason
    why nothing was predicted."""
    line = outcome.line
    head = f"{line.place:30} {_configuration(line):46} {line.cells.get('metric', '')[:24]:24}"
    value = f"{line.cells.get('value', '')[:10]:>10} {line.cells.get('unit', '')[:12]:12}"
    if outcome.prediction is None:
        return f"{head} {value} not predicted: {outcome.reason}"
    return f"{head} {value} {outcome.prediction.text:>10} {outcome.prediction.relative_error:+8.1%}"


def _configuration(line: Line) -> str:
    """A row's model, degrees and batch."""
    cells = line.cells
    words = [cells.get("model", "")[:14], f"{cells.get('num_gpus', '')}gpu"]
    words += [f"{k}{cells[k]}" for k in ("tp", "pp", "dp") if cells.get(k)]
    return " ".join(
        [*words, f"mb{cells.get('micro_batch', '')}", f"b{cells.get('global_batch', '')}"]
    )


def _summary(outcomes: Sequence[Outcome], errors: Sequence[Errors]) -> str:
    predicted = predicted_rows(outcomes)
    text = [
        "absolute relative error, simulated against published (ratio: of pairs of runs that differ "
        "in schedule or parallelism alone)",
        "",
        HEADER,
        *(error.line() for error in errors),
        "",
        f"{len(predicted)} of {len(outcomes)} rows predicted",
    ]
    for (table, reason), count in refusals(outcomes).most_common():
        text.append(f"refused: {count:4} of {table}: {reason}")
    return "\n".join([*text, oom_line(predicted), ZEROPP.caveat])


if __name__ == "__main__":
    sys.exit(main())
