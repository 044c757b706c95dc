"""The suite from Python: run points, load what was measured, make the paper's table.

    from benchmarks import api

    api.run(["model=gpt_tiny num_gpus=4 contender=zeropp", "..."], runs_dir="results/runs")
    frame = api.load("results/runs")          # tidy: a row per record, numbers with units
    api.paper_table(frame)                    # a row per cell and contender
    print(api.paper_markdown(frame))          # the same as text

Whatever is wrong with the input is a ``SpecError`` of one line.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from benchmarks.report.ablation import ablation_figure, ablation_table
from benchmarks.report.bars import bars
from benchmarks.report.forms import latex, markdown
from benchmarks.report.frame import latest_ok, load_frame
from benchmarks.report.losses import loss_curves
from benchmarks.report.pairs import BASE
from benchmarks.report.paper import paper_grids
from benchmarks.report.paper import paper_table as _paper_table
from benchmarks.report.scaling import scaling_curves
from benchmarks.report.speedup_map import speedup_maps
from benchmarks.report.step_timelines import step_timelines
from benchmarks.report.tables import memory_table, speedup_table, throughput_table
from benchmarks.specification.compose import compose
from benchmarks.specification.run_spec import SpecError

if TYPE_CHECKING:
    from benchmarks.report.picture import Picture
    from benchmarks.report.table import Table

__all__ = [
    "SpecError",
    "ablation_table",
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
    """Run points and return the rows of their records, whether they ran now or before.

    A point is the text of a command line of ``benchmarks.run``, e.g. ``"model=gpt_tiny num_gpus=4
    contender=zeropp launcher=simulate"``; commas with ``-m`` sweep. A point that is recorded
    already is not run again, unless it says ``rerun=all``. Raises SpecError on bad input, before
    anything was started.
    """
    from benchmarks.launch.points import plan_point
    from benchmarks.launch.sweep import launch_points, spec_of

    lines = [points] if isinstance(points, str) else points
    configs = [
        config
        for line in lines
        for config in compose("config", [*shlex.split(line), f"runs_dir={runs_dir}"])
    ]
    planned = [plan_point(spec_of(config)) for config in configs]
    launch_points(planned, configs)
    return load(*dict.fromkeys(Path(runs_dir) / point.spec.spec_id for point in planned))


def load(*roots: PathLike) -> pd.DataFrame:
    """The rows of all records below the roots: of each configuration the latest success, or the
    latest attempt where none succeeded; smallest model first.

    Numbers are floats with their units in the columns' names (``step_s``, ``peak_gib``,
    ``tokens_per_s_per_gpu``); an interval is two more columns, ``_low`` and ``_high``, and what
    nobody knows is NaN. Raises SpecError on a root that does not exist and on a file that cannot
    be read.
    """
    paths = [Path(root) for root in roots]
    for path in paths:
        if not path.exists():
            raise SpecError(f"{path}: no such file or directory")
    frame, skipped = load_frame(paths)
    if skipped:
        raise SpecError(skipped[0])
    return latest_ok(frame)


def paper_table(frame: pd.DataFrame, base: str = BASE) -> pd.DataFrame:
    """The paper's table as numbers: a row per model, GPU count and contender, speed-ups over
    ``base``."""
    return _paper_table(frame, base).numbers


def paper_markdown(frame: pd.DataFrame, base: str = BASE) -> str:
    """The paper's table as Markdown, one per kind of evidence and cluster."""
    return "\n\n".join(markdown(grid) for grid in paper_grids(_paper_table(frame, base)))


def paper_latex(frame: pd.DataFrame, base: str = BASE) -> str:
    """The paper's table as LaTeX for ``\\input``; needs booktabs and graphicx."""
    return latex(list(paper_grids(_paper_table(frame, base))))


def tables(frame: pd.DataFrame, base: str = BASE) -> Mapping[str, pd.DataFrame]:
    """The other tables of a report as numbers: throughput, memory, speedup, ablation."""
    made: list[Table] = [
        throughput_table(frame),
        memory_table(frame),
        speedup_table(frame, base),
        ablation_table(frame),
    ]
    return {table.name: table.numbers for table in made}


def figures(frame: pd.DataFrame, section: str = "", base: str = BASE) -> Iterator[Picture]:
    """The figures of a report, each with its ``caption`` and ``figure``; those of one ``section``
    alone where it is named (Throughput, Memory, Speed-up, Scaling, Ablations, Loss, Timelines)."""
    drawings: dict[str, Any] = {
        "Throughput": bars,
        "Memory": bars,
        "Speed-up": lambda rows: speedup_maps(rows, base),
        "Scaling": scaling_curves,
        "Ablations": ablation_figure,
        "Loss": loss_curves,
        "Timelines": step_timelines,
    }
    if section and section not in drawings:
        raise SpecError(f"section={section!r}: must be one of {', '.join(drawings)}")
    chosen = [drawings[section]] if section else dict.fromkeys(drawings.values())
    for draw in chosen:
        for picture in draw(frame):
            if not section or picture.section == section:
                yield picture
