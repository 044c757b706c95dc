"""A table: its numbers for programs, and its text for people, made from the same numbers.

``Table`` has the numbers, for CSV and Parquet; an interval is three columns (``name``,
``name_low``, ``name_high``). ``Grid`` is its text, for a terminal, Markdown and LaTeX below, and
for HTML in ``templates/table.html.j2``: columns that never vary are moved into the caption, and
every number is rounded once (see ``display``).
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import pandas as pd
from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from benchmarks.report import display
from benchmarks.report.display import Form, is_missing

MISSING = "–"
_WORDS_WIDTH = 22  # columns of text are not folded to fewer letters
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
    # Heads that LaTeX leaves out, the first ones first, where a page has no room for all columns.
    optional: tuple[str, ...] = ()


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

    def grid(self) -> Grid:
        """The table as text; key columns that never vary are in the caption instead."""
        rows: list[dict[str, Any]] = self.data.to_dict("records")  # type: ignore[assignment]
        empty = {n for n, of in self.data.items() if of.isna().all() or (of == "").all()}
        visible = [c for c in self.columns if not c.hidden and (c.instead or c.name not in empty)]
        several = len(self.data) > 1
        constant = [c for c in visible if several and c.is_key and self.data[c.name].nunique() == 1]
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
        *map(_setting_column, display.varied(rows)),
        Column("evidence", "evidence", is_key=True),
        Column("basis", "basis", is_key=True),
        Column("contender", "contender", is_key=True),
    )


def _setting_column(name: str) -> Column:
    return Column(name, display.setting_label(name), is_key=True)


_PREAMBLE = "% needs \\usepackage{array,booktabs,graphicx,longtable}\n"
_PAGE_ROWS, _PAGE_COLUMNS, _PAGE_LETTERS = 40, 10, 100  # that a page of LaTeX has room for
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
    it those are whose every cell begins with a digit or a sign."""
    if numeric is None:
        numeric = [
            all(re.match(r"[~+-]?\d", row[i]) for row in rows) and bool(rows)
            for i in range(len(heads))
        ]
    rules = ["---:" if right else "---" for right in numeric]
    lines = [heads, rules, *([text.replace("|", "\\|") for text in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _group_names(grid: Grid) -> list[str]:
    if not grid.groups:
        return [""] * len(grid.heads)
    return [name for name, span in grid.groups for _ in range(span)]


def latex(grids: Sequence[Grid]) -> str:
    """One float per grid, with the rules of booktabs, scaled to fit the width of the text; a table
    over several pages where it has more rows than one. Of columns that are optional it has as many
    as fit, and where the others do not, several tables."""
    parts = [part for grid in grids for part in _of_a_page_width(grid)]
    return _PREAMBLE + "\n".join(map(_latex_table, parts))


def _of_a_page_width(grid: Grid) -> list[Grid]:
    if not grid.optional:
        return [grid]
    names, left_out = _group_names(grid), list[str]()
    kept = list(range(len(grid.heads)))
    for head in grid.optional:
        if len(kept) > _PAGE_COLUMNS:
            left_out.append(head)  # but from a group that has nothing else
            kept = [i for i in kept if grid.heads[i] != head or names.count(names[i]) == 1]
            names = [name if i in kept else "" for i, name in enumerate(names)]
    room, columns = max(1, _PAGE_COLUMNS - grid.keys), kept[grid.keys :]
    parts = [columns[i : i + room] for i in range(0, len(columns), room)]
    more = f" In the files of numbers: {', '.join(left_out)}." * bool(left_out)
    return [_part(grid, [*kept[: grid.keys], *part], more) for part in parts]


def _part(grid: Grid, columns: Sequence[int], more: str) -> Grid:
    """The grid with some of its columns, and ``more`` words in its caption."""
    names = [_group_names(grid)[i] for i in columns]
    spans = [(name, len(list(of))) for name, of in groupby(names)]
    return replace(
        grid,
        caption=grid.caption + more,
        heads=tuple(grid.heads[i] for i in columns),
        numeric=tuple(grid.numeric[i] for i in columns),
        rows=tuple(tuple(row[i] for i in columns) for row in grid.rows),
        groups=tuple(spans) if grid.groups else (),
    )


def _latex_table(grid: Grid) -> str:
    if not grid.rows:
        return f"% {grid.title}: no rows\n"
    heads = " & ".join(map(_escaped, grid.heads)) + r" \\"
    names, rules, first = [], [], 1  # the line of group headings, and the rules below it
    for name, span in grid.groups:
        blank = "&" * (span - 1)
        names.append(rf"\multicolumn{{{span}}}{{c}}{{{_escaped(name)}}}" if name else blank)
        if name:
            rules.append(rf"\cmidrule(lr){{{first}-{first + span - 1}}}")
        first += span
    groups = [" & ".join(names) + r" \\", " ".join(rules)] if grid.groups else []
    body = [
        " & ".join(rf"\textbf{{{_escaped(c.text)}}}" if c.bold else _escaped(c.text) for c in row)
        + r" \\"
        for row in grid.rows
    ]
    form = "".join("r" if right else "l" for right in grid.numeric)
    caption = _escaped(" ".join((f"{grid.title}.", grid.caption, *grid.notes)).strip())
    if len(grid.rows) > _PAGE_ROWS:
        head = "\n".join([r"\toprule", *groups, heads, r"\midrule"])
        return "\n".join(
            [
                r"{\tiny\setlength{\tabcolsep}{2pt}\setlength{\LTcapwidth}{\linewidth}",
                rf"\begin{{longtable}}{{@{{}}{_folded(grid)}@{{}}}}",
                rf"\caption{{{caption}}}\\",
                *(head, r"\endfirsthead", head, r"\endhead", r"\bottomrule", r"\endfoot"),
                *body,
                r"\end{longtable}}",
                "",
            ]
        )
    return "\n".join(
        [
            r"\begin{table*}[tbp]",
            rf"\caption{{{caption}}}",
            r"\centering\footnotesize\setlength{\tabcolsep}{3pt}",
            r"\resizebox{\ifdim\width>\textwidth\textwidth\else\width\fi}{!}{%",
            rf"\begin{{tabular}}{{@{{}}{form}@{{}}}}",
            r"\toprule",
            *groups,
            heads,
            r"\midrule",
            *body,
            r"\bottomrule",
            r"\end{tabular}}",
            r"\end{table*}",
            "",
        ]
    )


def _folded(grid: Grid) -> str:
    """Columns of LaTeX in shares of the text's width, those of text folded so that all fit."""
    texts = [[head, *(row[i].text for row in grid.rows)] for i, head in enumerate(grid.heads)]
    letters = [max(map(len, of)) for of in texts]
    numbers = sum(n for n, right in zip(letters, grid.numeric, strict=True) if right)
    most = max(12, (_PAGE_LETTERS - numbers) // max(1, grid.numeric.count(False)))
    letters = [n if right else min(n, most) for n, right in zip(letters, grid.numeric, strict=True)]
    share = (1 - 0.014 * len(letters)) / sum(letters)  # the rest is between the columns
    return "".join(
        rf">{{\ragged{'left' if right else 'right'}\arraybackslash}}p{{{share * n:.4f}\linewidth}}"
        for n, right in zip(letters, grid.numeric, strict=True)
    )


def _escaped(text: str) -> str:
    """A text as LaTeX; characters without a glyph in pdflatex become question marks."""
    known = text.translate(str.maketrans(_SPECIAL))
    return "".join(c if " " <= c <= "ÿ" else "?" for c in known)


def rich_table(grid: Grid, widths: Sequence[int]) -> RichTable:
    """The table for the terminal, with columns of these widths."""
    table = RichTable(
        title=Text(grid.title),
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        caption=Text(" ".join((grid.caption, *grid.notes)).strip()) if grid.caption else None,
        caption_justify="left",
    )
    names = _group_names(grid)
    for index, (group, head) in enumerate(zip(names, grid.heads, strict=True)):
        first = index == 0 or names[index - 1] != group
        text = f"{group if first else ''}\n{head}" if grid.groups else head
        table.add_column(
            Text(text),
            justify="right" if grid.numeric[index] else "left",
            no_wrap=grid.numeric[index],
            width=widths[index],
        )
    for row in grid.rows:
        table.add_row(*(Text(cell.text, style="bold" if cell.bold else "") for cell in row))
    return table


def _column_widths(grid: Grid) -> tuple[list[int], list[int]]:
    """(the widths down to which columns may be folded, those without a folded cell): a column of
    numbers may not be folded, one of text to its longest word, or to a few words."""
    least, whole = [], []
    for index, head in enumerate(grid.heads):
        texts = [head, *(row[index].text for row in grid.rows)]
        whole.append(max(len(line) for text in texts for line in text.split("\n")))
        longest = max(len(word) for text in texts for word in ["", *text.split()])
        folded = max(longest, min(whole[-1], _WORDS_WIDTH))
        least.append(whole[-1] if grid.numeric[index] else folded)
    return least, whole


def _widths(grid: Grid, room: int) -> list[int]:
    """The widths of the columns in a terminal of ``room`` letters: of those of text, which may be
    folded, the first ones get what they need. Empty if even the least widths do not fit."""
    widths, whole = _column_widths(grid)
    spare = room - sum(widths) - 2 * len(widths)  # a space stands on both sides of a column
    if spare < 0:
        return []
    for index, width in enumerate(widths):
        more = min(spare, whole[index] - width)
        widths[index] += more
        spare -= more
    return widths


def print_table(made: Table, console: Console, most: int = 60) -> None:
    """Print the first rows of a table with all of their text. If the terminal is too narrow,
    configurations and intervals move to a second line, and if that is still too wide, every row is
    a paragraph. One row is printed as ``key: value``."""
    grid = made.grid()
    if len(grid.rows) < 2:
        pairs = zip(grid.heads, *grid.rows, strict=True) if grid.rows else []
        lines = [f"{head + ':':22} {cell.text}" for head, cell in pairs if cell.text != MISSING]
        text = "\n".join([*lines, grid.caption if lines else f"{grid.title}: no rows"])
        console.print(text, markup=False, highlight=False)
        return
    shown = replace(grid, rows=grid.rows[:most])
    _, whole = _column_widths(shown)
    if _widths(shown, console.width) == whole:
        console.print(rich_table(shown, whole))
    elif widths := _widths(narrow := _narrowed(shown), console.width):
        console.print(rich_table(narrow, widths))
    else:
        _print_paragraphs(shown, console)
    if len(grid.rows) > most:
        console.print(f"... {len(grid.rows) - most} more rows are in the files", highlight=False)


def _print_paragraphs(grid: Grid, console: Console) -> None:
    """Print every row as what names it, and below it what is known of it."""
    console.print(Text(f"{grid.title}\n", style="bold"))
    for row in grid.rows:
        known = [
            cell.text if index < grid.keys and _is_word(cell.text) else f"{head}: {cell.text}"
            for index, (head, cell) in enumerate(zip(grid.heads, row, strict=True))
            if cell.text not in ("", MISSING)
        ]
        names = sum(cell.text not in ("", MISSING) for cell in row[: grid.keys])
        console.print(Text(", ".join(known[:names])))
        for line in _lines("; ".join(known[names:]), console.width - 4):
            console.print(Text(f"    {line}"))
    console.print(Text("\n" + " ".join((grid.caption, *grid.notes)).strip()))


def _is_word(text: str) -> bool:
    """Whether the value of a key is clear without the key's name."""
    return text[0].isalpha() and text.lower() not in ("true", "false", "none")


def _narrowed(grid: Grid) -> Grid:
    """The grid with keys below the first one, the configuration below its contender, and every
    interval below its number."""
    heads = list(grid.heads)
    moved = dict.fromkeys(range(1, grid.keys), 0)
    place = heads.index("contender") if "contender" in heads else None
    for index, head in enumerate(heads):
        if index and head in ("configuration", "layout"):
            moved[index] = 0 if place is None or place in moved else place
    kept = [index for index in range(len(heads)) if index not in moved]
    rows = []
    for row in grid.rows:
        texts = [cell.text.replace(" [", "\n[") for cell in row]
        for place in sorted(set(moved.values())):
            names = (row[index].text for index, to in moved.items() if to == place)
            below = " ".join(name for name in names if name != MISSING)
            texts[place] += f"\n {below}"
        rows.append(tuple(replace(row[index], text=texts[index]) for index in kept))
    if grid.keys > 1:
        heads[0] += "\n " + " ".join(heads[1 : grid.keys])
    return replace(
        grid,
        heads=tuple("\n".join(_lines(heads[i], 14)) if grid.numeric[i] else heads[i] for i in kept),
        numeric=tuple(grid.numeric[index] for index in kept),
        rows=tuple(rows),
        groups=(),
    )


def _lines(text: str, width: int) -> list[str]:
    """A text in lines of this width, or of a single longer word."""
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)
