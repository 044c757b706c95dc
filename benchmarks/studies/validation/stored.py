"""Reads predictions that were written before into ``validation.csv``; nothing is priced."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path

from benchmarks.studies.validation.errors import Errors, Kind, Predicted, Prediction, errors_of
from benchmarks.studies.validation.rows import COLUMNS, PublishedRow

Cells = Mapping[str, str]


def cells_by_place(path: Path) -> dict[str, Cells]:
    """The lines of a file by the place of their row. Raises OSError if it cannot be read."""
    with path.open(newline="", encoding="utf-8") as file:
        return {cells["place"]: cells for cells in csv.DictReader(file)}


def row_of(cells: Cells) -> PublishedRow:
    """The published row of a line of ``validation.csv``."""
    return PublishedRow.model_validate({name: cells[name] for name in COLUMNS if cells.get(name)})


def predicted(row: PublishedRow, cells: Cells) -> Predicted:
    """A row that has a number, with the prediction in ``cells``."""
    kind: Kind = "memory" if row.measure.kind == "memory" else "throughput"
    prediction = Prediction(
        kind=kind,
        value=float(cells["predicted"]),
        text=cells["predicted"],
        relative_error=float(cells["relative_error"]),
    )
    return Predicted(row, prediction)


def stored_errors(path: Path) -> list[Errors]:
    """The errors of all predictions in a ``validation.csv``, as ``errors.csv`` beside it says
    them."""
    numbers = [
        cells
        for cells in cells_by_place(path).values()
        if cells["predicted"] and cells["unit"] != "yes/no"
    ]
    return errors_of([predicted(row_of(cells), cells) for cells in numbers])
