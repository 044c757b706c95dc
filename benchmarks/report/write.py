"""Makes a report: reads records, writes tables, figures and the page, and prints their paths."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import pandas as pd
from rich.console import Console

from benchmarks.report.ablation import ablation_figure, ablation_table
from benchmarks.report.breakdown import memory_breakdown
from benchmarks.report.charts import (
    Picture,
    SavedPicture,
    bars,
    loss_curves,
    save,
    scaling_curves,
    speedup_maps,
)
from benchmarks.report.forms import fits, rich_table, write_table
from benchmarks.report.frame import latest_ok, load_frame, notes_of
from benchmarks.report.headline import BASE, answers, base_of, headline_table, print_table
from benchmarks.report.page import Page, report_folder, table_page, write_page
from benchmarks.report.paper import paper_grids
from benchmarks.report.published import published_figure
from benchmarks.report.table import Grid, Table
from benchmarks.report.tables import comparison_table, comparison_tables, evidence_distance_figure
from benchmarks.report.timelines import step_timelines, write_traces
from benchmarks.specification.command import leave_interrupts_to_parent, told

# Draws all figures of a report, with one process per core.


Draw = Callable[[pd.DataFrame], Iterator[Picture]]


def draw(
    rows: pd.DataFrame,
    base: str,
    against: Mapping[str, str],
    out: Path,
    *,
    every_timeline: bool = False,
) -> list[SavedPicture]:
    """Draw and write every figure, and return them in the order of the page."""
    light = rows.drop(columns=["source"])  # it is large, and only the page reads it
    each: list[Draw] = [
        bars,
        partial(speedup_maps, base=base),
        scaling_curves,
        partial(ablation_figure, against=against),
        memory_breakdown,
        partial(step_timelines, every=every_timeline),
        loss_curves,
    ]
    groups = [g for _, g in light.groupby(["evidence", "basis", "cluster"], sort=True)]
    tasks = [(function, group) for function in each for group in groups]
    tasks += [(evidence_distance_figure, light), (published_figure, light)]
    workers = min(os.cpu_count() or 1, len(tasks))
    context = multiprocessing.get_context("fork")  # matplotlib is imported already
    with ProcessPoolExecutor(workers, context, leave_interrupts_to_parent) as pool:
        jobs = [pool.submit(_drawn, function, group, out) for function, group in tasks]
        for _ in told(as_completed(jobs), len(jobs), "groups of figures"):
            pass
        return [picture for job in jobs for picture in job.result()]


def _drawn(function: Draw, rows: pd.DataFrame, out: Path) -> list[SavedPicture]:
    return [save(picture, out) for picture in function(rows)]


MAX_PRINTED = 60  # rows in the terminal; the files have all


@dataclass(frozen=True)
class Options:
    """Options of a report: the ``base`` of speed-ups (empty: DeepSpeed 3D), the knobs of the
    configuration that ablations are ``against``, and whether to draw every timeline."""

    base: str = ""
    against: Mapping[str, str] = field(default_factory=dict)
    timelines: bool = False


@dataclass(frozen=True)
class ReportPaths:
    """The files that were written, and one line per file that was skipped."""

    files: list[Path]
    skipped: list[str]


def write_report(
    roots: Sequence[Path],
    out: Path,
    console: Console | None = None,
    options: Options = Options(),
) -> ReportPaths:
    """Write all tables, figures and the page of the records below ``roots`` into ``out``.

    It prints the headline table and the paths. Files that cannot be read are named and skipped.
    Raises BaseError or AblationError if no record fits the options.
    """
    console = console or Console()
    rows, skipped = _rows(roots, console)
    if rows.empty:
        return ReportPaths([], skipped)
    base = base_of(rows, options.base) if options.base else BASE
    tables = comparison_tables(rows, base)
    tables["ablation"] = ablation_table(rows, options.against)
    _print_headline(rows, base, console)
    with report_folder(out) as folder:
        pictures = draw(rows, base, options.against, folder, every_timeline=options.timelines)
        grids = {name: grids_of(table) for name, table in tables.items()}
        page = Page(
            rows=rows,
            grids=grids,
            pictures=pictures,
            skipped=skipped,
            answers=list(answers(rows, base)),
        )
        files = [write_page(page, folder), *_write_tables(tables, grids, folder)]
        files += [path for picture in pictures for path in picture.paths]
        files += write_traces(rows, folder, every=options.timelines)
        names = [path.relative_to(folder) for path in files]
    _print_paths(names, out, console)
    return ReportPaths([out / name for name in names], skipped)


def write_one_table(
    name: str, roots: Sequence[Path], *, out: Path, options: Options, console: Console | None = None
) -> ReportPaths:
    """Print one table of ``comparison_tables`` and write it as CSV, Parquet, Markdown, LaTeX and
    HTML."""
    console = console or Console()
    rows, skipped = _rows(roots, console)
    if rows.empty:
        return ReportPaths([], skipped)
    base = base_of(rows, options.base) if options.base else BASE
    if name == "ablation":
        table = ablation_table(rows, options.against)
    else:
        table = comparison_table(name, rows, base)
    grids = grids_of(table)
    names = write_table_forms(table, grids, out)
    _print_grids(table, grids, rows=rows, base=base, console=console)
    for note in notes_of(rows):
        console.print(note)
    _print_paths(names, out, console)
    return ReportPaths([out / name for name in names], skipped)


def write_table_forms(table: Table, grids: list[Grid], out: Path) -> list[Path]:
    """Write one table, whose text is in ``grids``, in every form into a folder of its own; returns
    the names of the files."""
    with report_folder(out) as folder:
        files = [*write_table(table, grids, folder), table_page(table.name, grids, folder)]
        return [path.relative_to(folder) for path in files]


def _rows(roots: Sequence[Path], console: Console) -> tuple[pd.DataFrame, list[str]]:
    frame, skipped = load_frame(roots)
    for line in skipped:
        console.print(f"skipped {line}", markup=False)
    if frame.empty:
        console.print(f"no records below {', '.join(map(str, roots))}", markup=False)
    return latest_ok(frame), skipped


def grids_of(table: Table) -> list[Grid]:
    """The text of a table: one grid, or for the paper's table one per kind of evidence, basis and
    cluster."""
    if table.name == "paper":
        return list(paper_grids(table))
    return [table.grid()]


def _write_tables(
    tables: Mapping[str, Table], grids: Mapping[str, list[Grid]], out: Path
) -> list[Path]:
    paths = [path for name, made in tables.items() for path in write_table(made, grids[name], out)]
    together = out / "tables.md"
    together.write_text("\n".join((out / f"{name}.md").read_text() for name in tables))
    return [together, *paths]


def _print_headline(rows: pd.DataFrame, base: str, console: Console) -> None:
    made = headline_table(rows, base)
    print_table(replace(made, data=made.data[:MAX_PRINTED]), console)
    for note in notes_of(rows):
        console.print(note)
    if len(rows) > MAX_PRINTED:
        console.print(f"... {len(rows) - MAX_PRINTED} more rows are in the files")


def _print_grids(
    table: Table, grids: list[Grid], *, rows: pd.DataFrame, base: str, console: Console
) -> None:
    """Print the table if the terminal is wide enough, otherwise one line per contender."""
    for grid in grids:
        if fits(grid, console):
            console.print(rich_table(grid))
        elif table.name == "paper":
            console.print("The terminal is too narrow for a group of columns per contender:")
            _print_headline(rows, base, console)
            break
        else:
            print_table(table, console)


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
