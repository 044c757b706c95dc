"""Compares the committed tables with what today's code computes, or writes them again.

A table does not show that older code has computed it. So some rows of each table are computed
again, other rows every day, and a row that differs by more than rounding is an error. Of tables
that follow from other tables without pricing, every row is computed. One altered row among n is
found on a given day with the chance rows/n that the output shows (``0 of 20 rows differ (drawn
from 3,011)``); code that changes a share s of the rows is missed with (1 - s)^rows.

    python -m benchmarks.studies.recheck                 # a sample, drawn by today's date
    python -m benchmarks.studies.recheck --rows 0        # every row (an hour)
    python -m benchmarks.studies.recheck --renew         # write all tables again, and what changed;
                                                         # run again, it goes on where it stopped
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from benchmarks import CHECKOUT
from benchmarks.specification.command import CommandParser, run_command
from benchmarks.specification.run_spec import SpecError
from benchmarks.studies.recheck.tables import TABLES, Row, Table, differences, renew

REFERENCE = CHECKOUT / "results" / "reference"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns 0 if every drawn row is what today's code computes, 1 if any is
    not, 2 on bad input."""
    return run_command(partial(_recheck, arguments))


def _recheck(arguments: Sequence[str] | None) -> int:
    options = _parser().parse_args(arguments)
    tables = [table for table in TABLES if options.only in table.path]
    if not tables:
        known = ", ".join(table.path for table in TABLES)
        raise SpecError(f"--only {options.only}: no such table (known: {known})")
    for table in tables:
        if not (options.reference / table.path).exists():
            raise SpecError(f"--reference {options.reference}: {table.path} is not there")
    if options.renew:
        status = renew(tables, options.reference, REFERENCE)
        print("pages that quote these tables are written by: python -m docs.make")
        return status
    print(f"seed {options.seed}")
    stale = sum(
        _check(table, options.reference, random.Random(options.seed), options.rows)
        for table in tables
    )
    return 1 if stale else 0


def _check(table: Table, reference: Path, draw: random.Random, count: int | None) -> int:
    """Print the drawn rows that differ, with the columns, and rows that the file lacks; returns
    their number."""
    rows = table.read(reference)
    wanted = table.rows if count is None else count or len(rows)
    drawn = draw.sample(rows, min(wanted, len(rows)))
    if not drawn:
        raise SpecError(f"{table.path}: no rows")
    found = [line for row in drawn for line in _stale(table, row, reference)]
    missing = [f"  {key}: the file has no such row" for key in table.missing(reference)]
    words = f"{len(found)} of {len(drawn)} rows differ (drawn from {len(rows):,})"
    print("\n".join([f"{table.path}: {words}", *found, *missing]))
    return len(found) + len(missing)


def _stale(table: Table, row: Row, reference: Path) -> Iterator[str]:
    name = " ".join(filter(None, (row.get(key, "") for key in table.keys)))
    try:
        different = differences(row, table.again(row, reference))
    except ValueError as error:  # no such plan, or no such row any more
        yield f"  {name}: {error}"
        return
    if different:
        words = (f"{column} {old!r} -> {new!r}" for column, (old, new) in different.items())
        yield f"  {name}: " + ", ".join(words)


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="python -m benchmarks.studies.recheck",
        description="Compute rows of the committed tables again and fail if one differs by more "
        "than rounding; --renew writes the tables again and prints what changed.",
        epilog="example: python -m benchmarks.studies.recheck --only plans --rows 20 --seed 7",
    )
    today = datetime.now(UTC).date().toordinal()
    parser.add_argument("--seed", type=int, default=today, help="seed of the sample (today's date)")
    parser.add_argument(
        "--rows", type=int, help="rows per table; 0: all (as many as take a few seconds)"
    )
    parser.add_argument("--only", default="", metavar="PART", help="tables with this in their path")
    parser.add_argument("--reference", type=Path, default=REFERENCE, help="the tables' folder")
    parser.add_argument(
        "--renew", action="store_true", help="write the tables anew, or go on with it"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
