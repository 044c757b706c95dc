"""From CSV files to rows: a line becomes a row, or is refused with its column and value."""

from __future__ import annotations

import csv
import difflib
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from benchmarks import CHECKOUT
from benchmarks.specification.run_spec import SpecError
from benchmarks.studies.validation.rows import COLUMNS, OPTIONAL, PublishedRow

PUBLISHED = CHECKOUT / "results" / "published"
# Tables that are not of training runs and have other columns.
OTHER_TABLES = (
    "claims.csv", "gemm_efficiency.csv", "hardware.csv", "nccl_busbw.csv", "product_times.csv",
)  # fmt: skip


def training_tables() -> list[Path]:
    """The tables of results/published that hold training runs."""
    return [path for path in sorted(PUBLISHED.glob("*.csv")) if path.name not in OTHER_TABLES]


@dataclass(frozen=True)
class Line:
    """A line of a table: its ``cells``, and either the row or the reason why it was refused."""

    place: str  # file and line
    cells: dict[str, str]
    row: PublishedRow | None
    refusal: str = ""


def read_rows(path: Path) -> list[Line]:
    """All lines of a table. Raises SpecError, in one line, if the file cannot be read or if its
    header does not have the columns of the schema."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            header, *rest = [*csv.reader(file, strict=True)] or [[]]
    except OSError as error:
        raise SpecError(f"{path}: {(error.strerror or str(error)).lower()}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise SpecError(f"{path}: not a CSV file in UTF-8 ({error})") from None
    _check_header(path, header)
    return [_line(f"{path.name}:{n}", header, cells) for n, cells in enumerate(rest, 2) if cells]


def _check_header(path: Path, header: list[str]) -> None:
    for name in header:
        if name not in COLUMNS:
            near = difflib.get_close_matches(name, COLUMNS, 1)
            meant = f"is {near[0]!r} meant?" if near else "docs/published_rows.md has the schema"
            raise SpecError(f"{path}: column {name!r} is not known ({meant})")
        if header.count(name) > 1:
            raise SpecError(f"{path}: column {name!r} appears twice")
    for name in COLUMNS:
        if name not in header and name not in OPTIONAL:
            raise SpecError(f"{path}: column {name!r} is missing (docs/published_rows.md)")


def _line(place: str, header: list[str], cells: list[str]) -> Line:
    named = dict(zip(header, cells, strict=False))
    if len(cells) != len(header):
        return Line(place, named, None, f"{len(cells)} cells, but {len(header)} columns")
    try:
        given = {name: cell for name, cell in named.items() if cell}
        return Line(place, named, PublishedRow.model_validate(given))
    except ValidationError as error:
        return Line(place, named, None, _one_line(error))


def _one_line(error: ValidationError) -> str:
    """The mistake in one line: all columns that are blank but must not be; otherwise the first
    column that is wrong, its value and what it must be."""
    blank = [str(e["loc"][0]) for e in error.errors() if e["type"] == "missing"]
    if blank:
        return f"blank, but must be given: {', '.join(blank)}"
    first = error.errors()[0]
    what = first["msg"].removeprefix("Value error, ")
    if not first["loc"]:
        return what  # a check of several columns, which names them
    column = first["loc"][0]
    if first["type"] == "literal_error":
        what = f"must be one of {first['ctx']['expected']}"
    value = first["input"]
    return what if what.startswith(f"{column}=") else f"{column}={value!r}: {what}"
