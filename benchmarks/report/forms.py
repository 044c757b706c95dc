"""Writes a table as CSV and Parquet (its numbers) and as Markdown, LaTeX or terminal text.

The template ``templates/table.html.j2`` writes it as HTML.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from benchmarks.report.table import Cell, Grid, Table

_PREAMBLE = "% needs \\usepackage{booktabs,graphicx}\n"
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


def write_numbers(table: Table, out: Path) -> list[Path]:
    """Write ``NAME.csv`` and ``NAME.parquet``: unformatted values, and a header in any case."""
    csv, parquet = (out / f"{table.name}.{suffix}" for suffix in ("csv", "parquet"))
    numbers = table.numbers
    numbers.to_csv(csv, index=False)
    numbers.to_parquet(parquet, index=False)
    return [csv, parquet]


def write_table(table: Table, grids: Sequence[Grid], out: Path) -> list[Path]:
    """Write the table's numbers, and ``NAME.tex`` and ``NAME.md`` with all of its grids."""
    tex, text = out / f"{table.name}.tex", out / f"{table.name}.md"
    tex.write_text(latex(grids))
    text.write_text("\n".join(f"## {grid.title}\n\n{markdown(grid)}\n" for grid in grids))
    return [*write_numbers(table, out), tex, text]


def markdown(grid: Grid) -> str:
    """A GitHub-flavoured Markdown table below its caption; column heads begin with their group."""
    heads = [
        " ".join(filter(None, pair)) for pair in zip(_group_names(grid), grid.heads, strict=True)
    ]
    lines = [heads, ["---:" if right else "---" for right in grid.numeric]]
    lines += [[_markdown_cell(cell) for cell in row] for row in grid.rows]
    text = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    caption = f"{grid.caption}\n\n" if grid.caption else ""
    notes = "".join(f"\n\n{note}" for note in grid.notes)
    return caption + (text if grid.rows else "(no rows)") + notes


def _markdown_cell(cell: Cell) -> str:
    text = cell.text.replace("|", "\\|")
    return f"**{text}**" if cell.bold and text else text


def _group_names(grid: Grid) -> list[str]:
    if not grid.groups:
        return [""] * len(grid.heads)
    return [name for name, span in grid.groups for _ in range(span)]


def latex(grids: Sequence[Grid]) -> str:
    """One float per grid, with the rules of booktabs, scaled to fit the width of the text."""
    return _PREAMBLE + "\n".join(_latex_table(grid) for grid in grids)


def _latex_table(grid: Grid) -> str:
    rules = [r"\toprule", *_latex_groups(grid), _latex_line(grid.heads), r"\midrule"]
    body = [
        " & ".join(rf"\textbf{{{_escaped(c.text)}}}" if c.bold else _escaped(c.text) for c in row)
        + r" \\"
        for row in grid.rows
    ]
    form = "".join("r" if right else "l" for right in grid.numeric)
    told = " ".join((f"{grid.title}.", grid.caption, *grid.notes))
    return "\n".join(
        [
            r"\begin{table*}[tbp]",
            rf"\caption{{{_escaped(told.strip())}}}",
            r"\centering\footnotesize\setlength{\tabcolsep}{3pt}",
            r"\resizebox{\ifdim\width>\textwidth\textwidth\else\width\fi}{!}{%",
            rf"\begin{{tabular}}{{@{{}}{form}@{{}}}}",
            *rules,
            *body,
            r"\bottomrule",
            r"\end{tabular}}",
            r"\end{table*}",
            "",
        ]
    )


def _latex_groups(grid: Grid) -> list[str]:
    """The line of group headings, and the rules below it."""
    if not grid.groups:
        return []
    cells, rules, first = [], [], 1
    for name, span in grid.groups:
        cells.append(
            rf"\multicolumn{{{span}}}{{c}}{{{_escaped(name)}}}" if name else "&" * (span - 1)
        )
        if name:
            rules.append(rf"\cmidrule(lr){{{first}-{first + span - 1}}}")
        first += span
    return [" & ".join(cells) + r" \\", " ".join(rules)]


def _latex_line(texts: Sequence[str]) -> str:
    return " & ".join(map(_escaped, texts)) + r" \\"


def _escaped(text: str) -> str:
    """A text as LaTeX; characters without a glyph in pdflatex become question marks."""
    known = text.translate(str.maketrans(_SPECIAL))
    return "".join(c if " " <= c <= "ÿ" else "?" for c in known)


def rich_table(grid: Grid) -> RichTable:
    """The table for the terminal."""
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
        )
    for row in grid.rows:
        table.add_row(*(Text(cell.text, style="bold" if cell.bold else "") for cell in row))
    return table


def fits(grid: Grid, console: Console) -> bool:
    """Whether the terminal is wide enough to show every cell in one line."""
    widths = [
        max(len(head), *(len(row[i].text) for row in grid.rows)) if grid.rows else len(head)
        for i, head in enumerate(grid.heads)
    ]
    return sum(widths) + len(widths) - 1 <= console.width
