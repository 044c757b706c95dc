"""Makes a report: reads records, writes tables, figures and the page, and prints their paths."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from rich.console import Console

from benchmarks.report import DEFAULTS, FIGURES, TABLES, Options, maker
from benchmarks.report.charts import SavedPicture, save
from benchmarks.report.frame import latest_ok, load_frame, notes_of
from benchmarks.report.page import Page, report_folder, table_page, write_page
from benchmarks.report.paper import paper_grids
from benchmarks.report.speedup import answers, headline_table
from benchmarks.report.table import Grid, Table, print_table, write_table
from benchmarks.report.timelines import write_traces
from benchmarks.specification.command import SpecError, track, workers

TEN = 10  # rows of a table that is asked for are printed; its files have all


@dataclass(frozen=True)
class ReportPaths:
    """The files that were written, and one line per file that was skipped."""

    files: list[Path]
    skipped: list[str]


def write_report(
    roots: Sequence[Path], out: Path, console: Console | None = None, options: Options = DEFAULTS
) -> ReportPaths:
    """Write all tables, figures and the page of the records below ``roots`` into ``out``.

    It prints the headline table and the paths. Files that cannot be read are named and skipped.
    Raises SpecError if no record fits the options.
    """
    console = console or Console()
    rows, skipped = _rows(roots, options, console)
    if rows.empty:
        return ReportPaths([], skipped)
    tables = {name: make_table(name, rows, options) for name in TABLES}
    print_table(headline_table(rows, options), console)
    for note in notes_of(rows):
        console.print(note)
    with report_folder(out) as folder:
        pictures = draw(rows, options, folder)
        grids = {name: grids_of(table) for name, table in tables.items()}
        page = Page(
            rows=rows,
            grids=grids,
            pictures=pictures,
            skipped=skipped,
            answers=answers(rows),
        )
        files = [write_page(page, folder), folder / "tables.md"]
        files += [
            path for name in tables for path in write_table(tables[name], grids[name], folder)
        ]
        files[1].write_text("\n".join((folder / f"{name}.md").read_text() for name in tables))
        files += [path for picture in pictures for path in picture.paths]
        files += write_traces(rows, folder, every=options.timelines)
        names = [path.relative_to(folder) for path in files]
    _print_paths(names, out, console)
    return ReportPaths([out / name for name in names], skipped)


def make_table(name: str, rows: pd.DataFrame, options: Options = DEFAULTS) -> Table:
    """The table of ``TABLES`` with this name, of the rows of ``latest_ok``."""
    made: Table = maker(TABLES[name][1])(rows, options)
    return made


def draw(rows: pd.DataFrame, options: Options, out: Path) -> list[SavedPicture]:
    """Draw and write every figure, with one process per core; returns them in the page's order."""
    light = rows.drop(columns=["source"])  # it is large, and only the page reads it
    count = min(os.cpu_count() or 1, len(FIGURES))
    with workers(count, "fork") as pool:  # matplotlib is imported already
        jobs = [pool.submit(_drawn, path, light, options, out) for path in FIGURES]
        for _ in track(as_completed(jobs), len(jobs), "kinds of figures"):
            pass
        return [picture for job in jobs for picture in job.result()]


def _drawn(path: str, rows: pd.DataFrame, options: Options, out: Path) -> list[SavedPicture]:
    return [save(picture, out) for picture in maker(path)(rows, options)]


def write_one_table(
    name: str, roots: Sequence[Path], *, out: Path, options: Options, console: Console | None = None
) -> ReportPaths:
    """Print one table of ``TABLES`` and write it as CSV, Parquet, Markdown, LaTeX and HTML."""
    console = console or Console()
    rows, skipped = _rows(roots, options, console)
    if rows.empty:
        return ReportPaths([], skipped)
    table = make_table(name, rows, options)
    names = write_table_forms(table, out)
    if name == "paper":  # wider than a terminal
        print_table(headline_table(rows, options), console, TEN)
    else:
        print_table(table, console, TEN)
    for note in notes_of(rows):
        console.print(note)
    _print_paths(names, out, console)
    return ReportPaths([out / name for name in names], skipped)


def write_table_forms(table: Table, out: Path) -> list[Path]:
    """Write one table in every form into a folder of its own; returns the names of the files."""
    grids = grids_of(table)
    with report_folder(out) as folder:
        files = [*write_table(table, grids, folder), table_page(table.name, grids, folder)]
        return [path.relative_to(folder) for path in files]


def grids_of(table: Table) -> list[Grid]:
    """The text of a table: one grid, or for the paper's table one per kind of evidence, basis and
    cluster."""
    return list(paper_grids(table)) if table.name == "paper" else [table.grid()]


def _rows(
    roots: Sequence[Path], options: Options, console: Console
) -> tuple[pd.DataFrame, list[str]]:
    frame, skipped = load_frame(roots)
    for line in skipped:
        console.print(f"skipped {line}", markup=False)
    known = sorted(set(frame["contender"]))
    if frame.empty:
        console.print(f"no records below {', '.join(map(str, roots))}", markup=False)
    elif options.base not in (*known, DEFAULTS.base):
        raise SpecError(
            f"--base={options.base}: no record of that contender (there are {', '.join(known)})"
        )
    return latest_ok(frame), skipped


def _print_paths(names: Sequence[Path], out: Path, console: Console) -> None:
    """Print where the report is: the page first, then the other files by suffix."""
    console.print(f"Written to {out}:", markup=False, highlight=False)
    kinds: dict[str, list[str]] = {}
    for path in names:
        kinds.setdefault(path.suffix.lstrip("."), []).append(path.name)
    for suffix, found in kinds.items():
        more = f" and {len(found) - 4} more" if len(found) > 4 else ""
        line = f"  {suffix:<8}{', '.join(found[:4])}{more}"
        console.print(line, markup=False, highlight=False, soft_wrap=True)
