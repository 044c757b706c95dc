"""A table: its numbers for programs, and its text for people, made from the same numbers.

``Table`` has the numbers, for CSV and Parquet; an interval is three columns (``name``,
``name_low``, ``name_high``). ``Grid`` is its text, for a terminal, Markdown and LaTeX below, and
for HTML in ``templates/table.html.j2``: columns that never vary are moved into the caption, and
every number is rounded once (see ``display``).
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from itertools import groupby, product
from pathlib import Path
from typing import Any, Literal

import pandas as pd
from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from benchmarks.report import display
from benchmarks.report.display import Form, is_missing

MISSING = "–"
_HEAD_LETTERS = 14  # of a line of a head above numbers in a terminal
_LABELS = {
    "model": display.model_label,
    "cluster": display.cluster_label,
    "contender": display.contender_label,
}


@dataclass(frozen=True)
class TextCell:
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
    rows: tuple[tuple[TextCell, ...], ...]
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
    instead: str = ""  # name of a column of statuses, which are shown for missing numbers
    unsettled: bool = False  # put a "~" before the number where name_unsettled has a reason
    is_key: bool = False  # names the row, and moves into the caption if it never varies
    hidden: bool = False  # is in the files of numbers, but not in the text

    @property
    def stored(self) -> list[str]:
        """The names of the columns of numbers that this column shows."""
        ends = [f"{self.name}_low", f"{self.name}_high"] if self.interval else []
        marks = [f"{self.name}_unsettled"] * self.unsettled
        return [self.name, *ends, *filter(None, [self.instead]), *marks]

    def cell(self, row: Mapping[str, Any]) -> TextCell:
        """The cell of this column in one row."""
        value = row[self.name]
        if is_missing(value) or value == "":
            instead = display.status_label(row[self.instead]) if self.instead else MISSING
            return TextCell(instead if value != "" else "")
        if self.form is None:
            number = float(value) if isinstance(value, int | float) else None
            return TextCell(_LABELS.get(self.name, display.value_text)(value), sort=number)
        text = self.form(value)
        if self.interval and not is_missing(row[f"{self.name}_low"]):
            ends = (self.form(row[f"{self.name}_{end}"]) for end in ("low", "high"))
            text += f" [{', '.join(ends)}]"
        mark = "~" if self.unsettled and row[f"{self.name}_unsettled"] else ""
        return TextCell(mark + text, sort=float(value))


@dataclass(frozen=True)
class Table:
    """Numbers with title, caption and notes. The records from which a row was made are named in the
    column ``records`` of ``data``, with spaces between them, or else in ``record_id``."""

    name: str
    title: str
    columns: tuple[Column, ...]
    data: pd.DataFrame
    caption: str
    notes: tuple[str, ...]

    @property
    def numbers(self) -> pd.DataFrame:
        """The columns that CSV and Parquet files have, each once."""
        names = dict.fromkeys(name for column in self.columns for name in column.stored)
        return self.data.reindex(columns=list(names)).reset_index(drop=True)

    def _never_varies(self, name: str) -> bool:
        """Whether a column has one value in all of several rows; one without records, such as a
        median, need not have it."""
        values = self.data[name].map(str)
        if "records" in self.data:
            values = values[self.data["records"].ne("") | self.data[name].notna()]
        return len(self.data) > 1 and values.nunique() == 1

    def grid(self) -> Grid:
        """The table as text; key columns that never vary are in the caption instead."""
        rows: list[dict[str, Any]] = self.data.to_dict("records")  # type: ignore[assignment]
        empty = {n for n, of in self.data.items() if of.isna().all() or (of == "").all()}
        visible = [c for c in self.columns if not c.hidden and (c.instead or c.name not in empty)]
        constant = [c for c in visible if c.is_key and self._never_varies(c.name)]
        shown = [c for c in visible if c not in constant]
        keys = "; ".join(f"{c.head}: {c.cell(rows[0]).text}" for c in constant) if rows else ""
        marked = [c.name for c in shown if c.unsettled]
        legend = display.unsettled(row[f"{name}_unsettled"] for name in marked for row in rows)
        told = (self.caption, f"{legend}." * bool(legend), f"All rows: {keys}." * bool(keys))
        return Grid(
            name=self.name,
            title=self.title,
            caption=" ".join(filter(None, told)),
            heads=tuple(c.head for c in shown),
            numeric=tuple(c.form is not None for c in shown),
            rows=tuple(tuple(c.cell(row) for c in shown) for row in rows),
            records=tuple(
                tuple(row.get("records", row.get("record_id", "")).split()) for row in rows
            ),
            keys=max(1, sum(c.is_key for c in shown)),
            notes=self.notes,
        )


def table(
    name: str, title: str, columns: Sequence[Column], data: pd.DataFrame, caption: str = ""
) -> Table:
    """Make a table; ``data`` gets the columns that it lacks, so that a table without rows has all
    of them."""
    wanted = dict.fromkeys(stored for column in columns for stored in column.stored)
    data = data.assign(**{column: None for column in wanted if column not in data})
    notes = tuple(filter(None, [display.unchecked_note(data)]))
    return Table(name, title, tuple(columns), data, caption, notes)


def key_columns(rows: pd.DataFrame) -> tuple[Column, ...]:
    """The columns that name a cell, and that move into the caption if they never vary."""
    return (
        Column("model", "model", is_key=True),
        Column("cluster", "cluster", is_key=True),
        Column("num_gpus", f"{display.worker_word(rows)}s", form=display.count, is_key=True),
        Column("global_batch", "batch", form=display.count, is_key=True),
        Column("seq", "sequence", form=display.count, is_key=True),
        Column("precision", "precision", is_key=True),
        *(Column(n, display.setting_label(n), is_key=True) for n in display.varied(rows)),
        Column("evidence", "evidence", is_key=True),
        Column("basis", "basis", is_key=True),
        Column("contender", "contender", is_key=True),
    )


_PAGE_ROWS, _PAGE_COLUMNS = 40, 10  # that a page of LaTeX has room for
_SPECIAL: dict[str, str | int | None] = {
    **{c: f"\\{c}" for c in "&%$#_{}"},
    "~": r"\textasciitilde{}",
    "\\": r"\textbackslash{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "–": "--",
    "×": r"$\times$",
    "→": r"$\rightarrow$",
    "≥": r"$\geq$",
}


def write_table(table: Table, grids: Sequence[Grid], out: Path) -> list[Path]:
    """Write the unformatted numbers as CSV and Parquet, with a header in any case, and ``NAME.tex``
    and ``NAME.md`` with all of the grids."""
    paths = [out / f"{table.name}.{suffix}" for suffix in ("csv", "parquet", "tex", "md")]
    numbers = table.numbers
    numbers.to_csv(paths[0], index=False)
    numbers.to_parquet(paths[1], index=False)
    paths[2].write_text(latex(grids), encoding="utf-8")
    sections = (f"## {grid.title}\n\n{markdown(grid)}\n" for grid in grids)
    paths[3].write_text("\n".join(sections), encoding="utf-8")
    return paths


def markdown(grid: Grid) -> str:
    """A GitHub-flavoured Markdown table below its caption; column heads begin with their group."""
    heads = [
        " ".join(filter(None, pair)) for pair in zip(_group_names(grid), grid.heads, strict=True)
    ]
    rows = [
        [f"**{cell.text}**" if cell.bold and cell.text else cell.text for cell in row]
        for row in grid.rows
    ]
    text = markdown_table(heads, rows, grid.numeric) if rows else "(no rows)"
    return "\n\n".join(filter(None, (grid.caption, text, *grid.notes)))


def markdown_table(
    heads: Sequence[str], rows: Sequence[Sequence[str]], numeric: Sequence[bool] | None = None
) -> str:
    """A Markdown table of texts. ``numeric`` says which columns are aligned to the right; without
    it those are, except the first, whose every cell begins with a digit, a sign or two asterisks,
    or is blank."""
    if numeric is None:
        number = re.compile(rf"[~+*-]*\d|{MISSING}?$")
        numeric = [i > 0 and all(number.match(row[i]) for row in rows) for i in range(len(heads))]
    rules = ["---:" if right else "---" for right in numeric]
    lines = [heads, rules, *([text.replace("|", "\\|") for text in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _group_names(grid: Grid) -> list[str]:
    return [name for name, span in grid.groups for _ in range(span)] or [""] * len(grid.heads)


def latex(grids: Sequence[Grid]) -> str:
    """Floats with the rules of booktabs, scaled to fit the width of the text: one per grid, or
    several where it has more rows, or of groups more columns, than a page has room for."""
    preamble = "% needs \\usepackage{booktabs,graphicx}"
    return "\n".join([preamble, *(part for grid in grids for part in _floats(grid))])


def _floats(grid: Grid) -> Iterator[str]:
    if not grid.rows:
        yield f"% {grid.title}: no rows\n"
        return
    groups, heads = ([*map(_escaped, names)] for names in (_group_names(grid), grid.heads))
    texts = [
        [rf"\textbf{{{_escaped(c.text)}}}" if c.bold else _escaped(c.text) for c in row]
        for row in grid.rows
    ]
    caption = _escaped(" ".join((f"{grid.title}.", grid.caption, *grid.notes)).strip())
    columns_in = max(1, _PAGE_COLUMNS - grid.keys) if grid.groups else len(heads)
    others = range(grid.keys, len(heads))
    for first, left in product(range(0, len(texts), _PAGE_ROWS), others[::columns_in] or [0]):
        kept = [*range(grid.keys), *others[left - grid.keys :][:columns_in]]
        above = [(name, len([*of])) for name, of in groupby(groups[i] for i in kept)]
        spans = (f"\\multicolumn{{{span}}}{{c}}{{{name}}}" for name, span in above)
        lines = [" & ".join(row[i] for i in kept) for row in texts[first : first + _PAGE_ROWS]]
        yield "\n".join(
            [
                f"\\begin{{table*}}[tbp]\n\\caption{{{caption}}}",
                "\\centering\\footnotesize\\setlength{\\tabcolsep}{3pt}",
                "\\resizebox{\\ifdim\\width>\\textwidth\\textwidth\\else\\width\\fi}{!}{%",
                f"\\begin{{tabular}}{{{''.join('lr'[grid.numeric[i]] for i in kept)}}}",
                "\\toprule",
                *[" & ".join(spans) + " \\\\"] * bool(grid.groups),
                " & ".join(heads[i] for i in kept) + " \\\\",
                "\\midrule",
                *(f"{line} \\\\" for line in lines),
                "\\bottomrule\n\\end{tabular}\n}\n\\end{table*}\n",
            ]
        )
    if len(texts) > _PAGE_ROWS or len(others) > columns_in:
        yield "\\clearpage\n"  # LaTeX keeps 52 floats at most


def _escaped(text: str) -> str:
    """A text as LaTeX; characters without a glyph in pdflatex become question marks."""
    known = text.translate(str.maketrans(_SPECIAL))
    return "".join(c if " " <= c <= "ÿ" else "?" for c in known)


def print_table(made: Table, console: Console, most: int = 60) -> None:
    """Print the first rows of a table with all of their text. If the terminal is too narrow, every
    row is a paragraph. One row is printed as ``key: value``."""
    grid = made.grid()
    if len(grid.rows) < 2:
        pairs = zip(grid.heads, *grid.rows, strict=True) if grid.rows else []
        lines = [f"{head + ':':22} {cell.text}" for head, cell in pairs if cell.text != MISSING]
        text = "\n".join([*lines, grid.caption if lines else f"{grid.title}: no rows"])
        console.print(text, markup=False, highlight=False)
        return
    shown = replace(grid, rows=grid.rows[:most])
    heads = [
        textwrap.fill(head, _HEAD_LETTERS, break_long_words=False) if right else head
        for head, right in zip(shown.heads, shown.numeric, strict=True)
    ]
    least = 0
    for right, head, *cells in zip(shown.numeric, heads, *shown.rows, strict=True):
        texts = [head, *(cell.text for cell in cells)]
        parts = (part for text in texts for part in (text.split("\n") if right else text.split()))
        least += 2 + max(map(len, parts), default=0)
    if least <= console.width:
        console.print(_rich_table(replace(shown, heads=tuple(heads))))
    else:
        _print_paragraphs(shown, console)
    if len(grid.rows) > most:
        console.print(f"... {len(grid.rows) - most} more rows are in the files", highlight=False)


def _rich_table(grid: Grid) -> RichTable:
    """The table for the terminal, in which text may be folded and numbers may not."""
    told = " ".join((grid.caption, *grid.notes)).strip()
    table = RichTable(
        title=Text(grid.title),
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        caption=Text(told) if told else None,
        caption_justify="left",
    )
    for head, right in zip(grid.heads, grid.numeric, strict=True):
        side: Literal["left", "right"] = "right" if right else "left"
        table.add_column(Text(head), justify=side, no_wrap=right, overflow="fold")
    for row in grid.rows:
        table.add_row(*(Text(cell.text, style="bold" if cell.bold else "") for cell in row))
    return table


def _print_paragraphs(grid: Grid, console: Console) -> None:
    """Print every row as what names it, and below it what is known of it."""
    console.print(Text(f"{grid.title}\n", style="bold"))
    for row in grid.rows:
        known = [
            cell.text
            if index < grid.keys
            and (cell.text[0].isalpha() and cell.text.lower() not in ("true", "false", "none"))
            else f"{head}: {cell.text}"
            for index, (head, cell) in enumerate(zip(grid.heads, row, strict=True))
            if cell.text not in ("", MISSING)
        ]
        names = sum(cell.text not in ("", MISSING) for cell in row[: grid.keys])
        console.print(Text(", ".join(known[:names])))
        told = textwrap.wrap(
            "; ".join(known[names:]),
            console.width - 4,
            break_long_words=False,
            break_on_hyphens=False,
        )
        for line in told:
            console.print(Text(f"    {line}"))
    console.print(Text("\n" + " ".join((grid.caption, *grid.notes)).strip()))
