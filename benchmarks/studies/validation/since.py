"""Errors of the simulator on the same rows at an earlier commit and today.

``earlier.csv`` beside the committed ``validation.csv`` has the predictions of commit 49bc59e
(21 November 2026), when the published tables had just become strict data. Tables were added since,
so errors over all rows of that day and over all of today's are not of the same runs. Both files are
read, and nothing is priced.

    python -m benchmarks.studies.validation.since --out results/reference/validation/since.csv
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks import CHECKOUT
from benchmarks.specification.command import CommandParser, check_writable, run_command
from benchmarks.specification.run_spec import SpecError
from benchmarks.studies.validation.errors import errors_of
from benchmarks.studies.validation.stored import Cells, cells_by_place, predicted, row_of

FOLDER = CHECKOUT / "results" / "reference" / "validation"
_SAME = ("metric", "value", "unit")  # what a place must hold in both files


def errors_since(folder: Path = FOLDER) -> list[dict[str, str]]:
    """The errors of each kind and source on the rows that both files of ``folder`` predict: median
    and 90th percentile of the absolute relative error, then and now. Raises SpecError if a file
    cannot be read, or if a place holds another number in the two files."""
    earlier, today = _read(folder / "earlier.csv"), _read(folder / "validation.csv")
    for place, cells in earlier.items():
        if any(cells[name] != today.get(place, {}).get(name) for name in _SAME):
            raise SpecError(f"{folder}/earlier.csv: {place} is another row in validation.csv")
    rows = {
        place: row_of(today[place])
        for place, cells in earlier.items()
        if cells["predicted"] and today[place]["predicted"]
    }
    then, now = (
        errors_of([predicted(row, answers[place]) for place, row in rows.items()])
        for answers in (earlier, today)
    )
    return [
        {
            "kind": new.kind,
            "source": new.source,
            "role": new.role,
            "rows": str(new.rows),
            "runs": str(new.runs),
            "median_then": f"{old.median:.4f}",
            "p90_then": f"{old.p90:.4f}",
            "median_now": f"{new.median:.4f}",
            "p90_now": f"{new.p90:.4f}",
        }
        for old, new in zip(then, now, strict=True)
    ]


def _read(path: Path) -> dict[str, Cells]:
    try:
        return cells_by_place(path)
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        needs = "--from takes a folder with earlier.csv and validation.csv"
        raise SpecError(f"{path}: cannot be read: {why}; {needs}") from None


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the errors of the same rows then and now, and write them where ``--out`` says."""
    return run_command(partial(_since, arguments))


def _since(arguments: Sequence[str] | None) -> int:
    parser = CommandParser(
        prog="python -m benchmarks.studies.validation.since",
        description="Errors of the simulator on the rows of 21 November 2026, then and today.",
    )
    parser.add_argument(
        "--from",
        dest="folder",
        type=Path,
        default=FOLDER,
        metavar="FOLDER",
        help="folder of earlier.csv and validation.csv; by default the committed one",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="CSV file to write")
    options = parser.parse_args(arguments)
    out: Path | None = options.out
    if out is not None:
        check_writable("--out", out.parent)
    lines = errors_since(options.folder)
    print(",".join(lines[0]), *(",".join(line.values()) for line in lines), sep="\n")
    if out is not None:
        with out.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(lines[0]))
            writer.writeheader()
            writer.writerows(lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
