"""The suite from Python: run points, load what was measured, make the paper's table.

    from benchmarks import api

    api.run(["model=gpt_tiny num_gpus=4 contender=zeropp", "..."], runs_dir="results/runs")
    frame = api.load("results/runs")          # one row per configuration, numbers with units
    api.paper_table(frame)                    # one row per cell and contender
    print(api.paper_markdown(frame))          # the same as text

Every mistake in the input raises ``SpecError`` with one line.
"""

from __future__ import annotations

import os
import shlex
import signal
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from benchmarks.report import DEFAULTS, SECTIONS, TABLES, Options, maker
from benchmarks.report.display import varied
from benchmarks.report.frame import CELL, KEPT_APART, best_configuration, latest_ok, load_frame
from benchmarks.report.table import latex, markdown
from benchmarks.report.tables import paper_grids
from benchmarks.report.write import make_table
from benchmarks.specification import SpecError
from benchmarks.specification.compose import compose

if TYPE_CHECKING:
    from benchmarks.report.charts import Picture

__all__ = [
    "SpecError",
    "cell_columns",
    "fastest",
    "figures",
    "load",
    "paper_latex",
    "paper_markdown",
    "paper_table",
    "run",
    "tables",
]

PathLike = str | os.PathLike[str]


def run(points: str | Sequence[str], runs_dir: PathLike = "results/runs") -> pd.DataFrame:
    """Run points and return the rows of their records, of those that had run before, too.

    A point is the text of a command line of ``benchmarks.run``, such as ``"model=gpt_tiny
    num_gpus=4 contender=zeropp launcher=simulate"``; with ``-m`` commas separate the values of a
    sweep. A point that has a record is not run again unless it says ``rerun=all``. Raises SpecError
    on bad input, before anything is started.
    """
    from benchmarks.launch.sweep import launch_points, point_of

    lines = [points] if isinstance(points, str) else points
    configs = [
        config
        for line in lines
        for config in compose("config", [*shlex.split(line), f"runs_dir={runs_dir}"])
    ]
    planned = [point_of(config) for config in configs]
    handler = signal.getsignal(signal.SIGINT)
    try:
        launch_points(planned, configs)
    finally:
        if signal.getsignal(signal.SIGINT) != handler:  # a sweep that Ctrl-C ends ignores the next
            signal.signal(signal.SIGINT, handler)
    return load(*dict.fromkeys(Path(runs_dir) / point.spec.spec_id for point in planned))


def load(*roots: PathLike) -> pd.DataFrame:
    """The records below the roots as one row per configuration, the smallest model first.

    The row is that of the latest success, or of the latest attempt if none succeeded. Numbers are
    floats with their units in the columns' names (``step_s``, ``peak_gib``,
    ``tokens_per_s_per_gpu``); an interval is two more columns, ``_low`` and ``_high``; numbers that
    are not known are NaN. Raises SpecError for a root that does not exist or a file that cannot be
    read.
    """
    paths = [Path(root) for root in roots]
    for path in paths:
        if not path.exists():
            raise SpecError(f"{path}: no such file or directory")
    frame, skipped = load_frame(paths)
    if skipped:
        raise SpecError(skipped[0])
    return latest_ok(frame)


def fastest(frame: pd.DataFrame) -> pd.DataFrame:
    """The fastest row of every contender in every cell, as tables and figures compare them."""
    return best_configuration(frame)


def cell_columns(frame: pd.DataFrame) -> list[str]:
    """The columns that tell the cells of these rows apart, ``model`` and ``num_gpus`` always: rows
    that agree in them differ in the contender only."""
    named = [name for name in CELL if name not in KEPT_APART]
    named = [name for name in (*named, *varied(frame)) if frame[name].nunique(dropna=False) > 1]
    return list(dict.fromkeys(["model", "num_gpus", *named]))


def paper_table(frame: pd.DataFrame, base: str = DEFAULTS.base) -> pd.DataFrame:
    """The paper's table as numbers: one row per model, GPU count and contender, with speed-ups over
    ``base``."""
    return make_table("paper", frame, Options(base)).numbers


def paper_markdown(
    frame: pd.DataFrame, base: str = DEFAULTS.base, columns: Sequence[str] = ()
) -> str:
    """The paper's table as Markdown, with one table per kind of evidence and cluster. ``columns``
    are those of each contender (``zeropp report --columns``): all, if there are none."""
    grids = paper_grids(make_table("paper", frame, Options(base, columns=tuple(columns))))
    return "\n\n".join(f"**{grid.title}**\n\n{markdown(grid)}" for grid in grids)


def paper_latex(frame: pd.DataFrame, base: str = DEFAULTS.base) -> str:
    """The paper's table as LaTeX for ``\\input``; its first line names the packages it needs."""
    return latex(list(paper_grids(make_table("paper", frame, Options(base)))))


def tables(frame: pd.DataFrame, base: str = DEFAULTS.base) -> Mapping[str, pd.DataFrame]:
    """All tables of a report as numbers, by name (``benchmarks.report.TABLES``)."""
    return {name: make_table(name, frame, Options(base)).numbers for name in TABLES}


def figures(frame: pd.DataFrame, section: str = "", base: str = DEFAULTS.base) -> Iterator[Picture]:
    """The figures of a report, each with its ``caption`` and ``figure``. ``section`` selects those
    of one section (``benchmarks.report.SECTIONS``). Raises SpecError for another name."""
    if section and section not in SECTIONS:
        raise SpecError(f"section={section!r}: must be one of {', '.join(SECTIONS)}")
    for name in [section] if section else SECTIONS:
        for path in SECTIONS[name].figures:
            yield from maker(path)(frame, Options(base))
