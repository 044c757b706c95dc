"""Make a report: read records, write tables, figures and the page, say where they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from rich.console import Console

from benchmarks.report.bars import bars
from benchmarks.report.breakdown import memory_breakdown
from benchmarks.report.evidence import evidence_distance_figure
from benchmarks.report.frame import latest_ok, load_frame, notes_of
from benchmarks.report.headline import headline_table
from benchmarks.report.losses import loss_curves
from benchmarks.report.page import write_page
from benchmarks.report.picture import Picture, save
from benchmarks.report.published import published_figure
from benchmarks.report.scaling import scaling_curves, speedup_maps
from benchmarks.report.step_timelines import step_timelines, write_traces
from benchmarks.report.tables import (
    MAX_PRINTED,
    comparison_tables,
    print_tables,
    wide_console,
    write_tables,
)

FIGURES: tuple[Callable[[pd.DataFrame], Iterator[Picture]], ...] = (
    bars,
    speedup_maps,
    scaling_curves,
    memory_breakdown,
    step_timelines,
    loss_curves,
    evidence_distance_figure,
    published_figure,
)


@dataclass(frozen=True)
class ReportPaths:
    """What was written, and which files were not records."""

    files: list[Path]
    skipped: list[str]


def write_report(roots: Sequence[Path], out: Path, console: Console | None = None) -> ReportPaths:
    """Write all tables, figures and the page of the records below ``roots`` into ``out``.

    Prints the headline table and the paths. Files that cannot be read are named and skipped.
    """
    console = console or wide_console()
    frame, skipped = load_frame(roots)
    for line in skipped:
        console.print(f"skipped {line}", markup=False)
    if frame.empty:
        console.print(f"no records below {', '.join(map(str, roots))}", markup=False)
        return ReportPaths([], skipped)
    out.mkdir(parents=True, exist_ok=True)
    rows = latest_ok(frame)
    tables = comparison_tables(rows)
    print_tables({"comparison": headline_table(rows[:MAX_PRINTED])}, console)
    for note in notes_of(rows):
        console.print(note)
    if len(rows) > MAX_PRINTED:
        console.print(f"... {len(rows) - MAX_PRINTED} more rows are in the files")
    pictures = [save(picture, out) for figures in FIGURES for picture in figures(rows)]
    images = [path for picture in pictures for path in picture.paths]
    page = write_page(rows, tables, pictures, skipped, out)
    files = [page, *write_tables(tables, out), *images, *write_traces(rows, out)]
    _print_paths(files, out, console)
    return ReportPaths(files, skipped)


def _print_paths(files: Sequence[Path], out: Path, console: Console) -> None:
    """Where the report is: the page first, then what else there is of each kind."""
    console.print(f"Written to {out}:", markup=False, highlight=False)
    names: dict[str, list[str]] = {}
    for path in files:
        names.setdefault(path.suffix.lstrip("."), []).append(path.relative_to(out).name)
    for suffix, found in names.items():
        more = f" and {len(found) - 4} more" if len(found) > 4 else ""
        line = f"  {suffix:<8}{', '.join(found[:4])}{more}"
        console.print(line, markup=False, highlight=False, soft_wrap=True)
