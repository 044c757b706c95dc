"""A table: its numbers for programs, and its text for people, made from the same numbers.

``Table`` has the numbers; an interval is three columns (``name``, ``name_low``, ``name_high``).
``Grid`` is its text for a terminal, Markdown, HTML or LaTeX (see ``forms``): columns that never
vary are moved into the caption, and every number is rounded once (see ``words``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import pandas as pd

from benchmarks.report import style
from benchmarks.report.style import Form, is_missing

MISSING = "–"
_LABELS = {
    "model": style.model_label,
    "cluster": style.cluster_label,
    "contender": style.contender_label,
}


@dataclass(frozen=True)
class Cell:
    """The text of one cell; ``sort`` is the number that it shows, or None."""

    text: str
    bold: bool = False
    sort: float | None = None


@dataclass(frozen=True, kw_only=True)
class Grid:
    """A table as text.

    ``groups`` are headings above the column heads, each with the number of columns that it spans.
    The first ``keys`` columns name a row. ``records[i]`` are the records from which row i was made,
    its own first.
    """

    name: str
    title: str
    caption: str
    heads: tuple[str, ...]
    numeric: tuple[bool, ...]  # which columns are aligned to the right
    rows: tuple[tuple[Cell, ...], ...]
    records: tuple[tuple[str, ...], ...]
    groups: tuple[tuple[str, int], ...] = ()
    keys: int = 1
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Column:
    """How a table shows one quantity."""

    name: str  # the name of the column of numbers
    head: str  # what people read, with the unit
    _: KW_ONLY
    form: Form | None = None  # how a number becomes text; None: the column is text
    interval: bool = False  # show name_low and name_high if they are known
    instead: str = ""  # name of a column of text that is shown if the number is missing
    unsure: str = ""  # name of a column of booleans; true puts a "~" before the number
    is_key: bool = False  # names the row, and moves into the caption if it never varies
    hidden: bool = False  # is in the files of numbers, but not in the text

    @property
    def stored(self) -> list[str]:
        """The names of the columns of numbers that this column shows."""
        ends = [f"{self.name}_low", f"{self.name}_high"] if self.interval else []
        return [self.name, *ends, *filter(None, (self.instead, self.unsure))]

    def cell(self, row: dict[str, Any]) -> Cell:
        """The cell of this column in one row."""
        value = row[self.name]
        if is_missing(value) or value == "":
            return Cell(str(row[self.instead]) if self.instead else MISSING * (value != ""))
        if self.form is None:
            return Cell(_LABELS.get(self.name, str)(value))
        text = self.form(value)
        if self.interval and not is_missing(row[f"{self.name}_low"]):
            ends = (self.form(row[f"{self.name}_{end}"]) for end in ("low", "high"))
            text += f" [{', '.join(ends)}]"
        mark = "~" if self.unsure and row[self.unsure] is True else ""
        return Cell(mark + text, sort=float(value))


@dataclass(frozen=True, kw_only=True)
class Table:
    """Numbers with title, caption and notes; the index of ``data`` names the records of a row."""

    name: str
    title: str
    columns: tuple[Column, ...]
    data: pd.DataFrame
    caption: str = ""
    notes: tuple[str, ...] = field(default=())

    @property
    def empty(self) -> bool:
        """Whether there is no row; files then have the header only."""
        return self.data.empty

    @property
    def numbers(self) -> pd.DataFrame:
        """The columns that CSV and Parquet files have, each once."""
        names = dict.fromkeys(name for column in self.columns for name in column.stored)
        return self.data.reindex(columns=list(names)).reset_index(drop=True)

    def grid(self) -> Grid:
        """The table as text; key columns that never vary are in the caption instead."""
        rows: list[dict[str, Any]] = self.data.to_dict("records")  # type: ignore[assignment]
        visible = [c for c in self.columns if not c.hidden]
        shown = [c for c in visible if not (c.is_key and self._constant(c))]
        told = [
            c for c in visible if c.is_key and self._constant(c) and not _is_blank(self.data, c)
        ]
        shown = [c for c in shown if not _is_blank(self.data, c)]
        said = "; ".join(f"{c.head}: {c.cell(rows[0]).text}" for c in told) if rows else ""
        return Grid(
            name=self.name,
            title=self.title,
            caption=" ".join(filter(None, (self.caption, f"All rows: {said}." if said else ""))),
            heads=tuple(c.head for c in shown),
            numeric=tuple(c.form is not None for c in shown),
            rows=tuple(tuple(c.cell(row) for c in shown) for row in rows),
            records=tuple(tuple(str(records).split()) for records in self.data.index),
            keys=max(1, sum(c.is_key for c in shown)),
            notes=self.notes,
        )

    def _constant(self, column: Column) -> bool:
        return len(self.data) > 1 and self.data[column.name].nunique() == 1


def _is_blank(data: pd.DataFrame, column: Column) -> bool:
    """Whether no row has anything to show in this column."""
    if column.instead:
        return False
    return bool(data[column.name].isna().all() or (data[column.name] == "").all())


def table(
    name: str, title: str, columns: Sequence[Column], data: pd.DataFrame, **more: Any
) -> Table:
    """Make a table; ``data`` gets the columns that it lacks, so that a table without rows has all
    of them."""
    wanted = dict.fromkeys(stored for column in columns for stored in column.stored)
    missing = {column: None for column in wanted if column not in data}
    return Table(
        name=name, title=title, columns=tuple(columns), data=data.assign(**missing), **more
    )


def key_columns(rows: pd.DataFrame) -> tuple[Column, ...]:
    """The columns that name a cell, and that move into the caption if they never vary."""
    return (
        Column("model", "model", is_key=True),
        Column("cluster", "cluster", is_key=True),
        Column("num_gpus", f"{style.worker_word(rows)}s", form=style.count, is_key=True),
        Column("global_batch", "batch", form=style.count, is_key=True),
        Column("seq", "sequence", form=style.count, is_key=True),
        Column("precision", "precision", is_key=True),
        Column("evidence", "evidence", is_key=True),
        Column("basis", "basis", is_key=True),
        Column("contender", "contender", is_key=True),
    )
