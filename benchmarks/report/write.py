"""Make a report: read records, write tables and figures, say where they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
from rich.console import Console

from benchmarks.report.bars import memory_bars, throughput_bars
from benchmarks.report.frame import load_frame
from benchmarks.report.headline import headline_table
from benchmarks.report.tables import comparison_tables, print_tables, write_tables


@dataclass(frozen=True)
class ReportPaths:
    """What was written, and which files were not records."""

    files: list[Path]
    skipped: list[str]


def write_report(roots: Sequence[Path], out: Path, console: Console | None = None) -> ReportPaths:
    """Write all tables and figures of the records below ``roots`` into ``out``.

    Prints the tables and the paths. Files that cannot be read are named and skipped.
    """
    console = console or Console()
    frame, skipped = load_frame(roots)
    for line in skipped:
        console.print(f"skipped {line}", markup=False)
    if frame.empty:
        console.print(f"no records below {', '.join(map(str, roots))}", markup=False)
        return ReportPaths([], skipped)
    out.mkdir(parents=True, exist_ok=True)
    tables = comparison_tables(frame)
    print_tables({"comparison": headline_table(frame)}, console)
    files = write_tables(tables, out) + _write_figures(frame, out)
    console.print("Written:")
    for path in files:
        console.print(f"  {path}", markup=False, highlight=False)
    return ReportPaths(files, skipped)


def _write_figures(frame: pd.DataFrame, out: Path) -> list[Path]:
    paths = []
    for name, figure in {
        "throughput": throughput_bars(frame),
        "memory": memory_bars(frame),
    }.items():
        if figure is None:
            continue
        for suffix in ("png", "svg"):
            paths.append(out / f"{name}.{suffix}")
            figure.savefig(paths[-1])
        plt.close(figure)
    return paths
