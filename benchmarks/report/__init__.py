"""Reports, which are made from records alone, at any time: what is in one, by name.

In: folders of records. Out: tables (CSV, Parquet, Markdown, LaTeX, HTML), figures and one page.
Read ``frame`` (a record becomes a row of a DataFrame), ``table`` and ``style`` (how tables and
figures look), the modules that are named below, and ``write`` and ``page``, which put a report
together. ``compare`` holds two sets of runs together, and ``trackers`` sends records to services
that collect experiments. A new table or figure is a function and a line here.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

# Every table by name: its heading on the page, and the function (rows, options) -> Table. Functions
# are named by their module here, so that ``--help`` need not import pandas and matplotlib.
TABLES = {
    "paper": ("", "paper:paper_table"),
    "throughput": ("Throughput", "tables:throughput_table"),
    "speedup": ("Speed-up", "speedup:speedup_table"),
    "ablation": ("Ablations", "ablation:ablation_table"),
    "memory": ("Memory", "tables:memory_table"),
    "lone_ranks": ("Memory", "tables:lone_table"),
    "evidence": ("Evidence", "evidence:evidence_table"),
    "published": ("Evidence", "evidence:published_table"),
}
# Every figure, a function (rows, options) -> Pictures, each of which names its heading.
FIGURES = (
    "charts:bars",
    "speedup:speedup_maps",
    "charts:scaling_curves",
    "ablation:ablation_figure",
    "breakdown:memory_breakdown",
    "timelines:step_timelines",
    "charts:loss_curves",
    "evidence:evidence_distance_figure",
    "evidence:published_figure",
)
# The headings of the page, in its order.
SECTIONS = (
    *("Throughput", "Speed-up", "Ablations", "Scaling", "Memory", "Timelines", "Loss"),
    "Evidence",
)


@dataclass(frozen=True)
class Options:
    """Options of a report: the contender over which speed-ups are given, the knobs of the
    configuration that ablations are ``against``, and whether to draw every timeline."""

    base: str = "deepspeed_3d"
    against: Mapping[str, str] = field(default_factory=dict)
    timelines: bool = False


DEFAULTS = Options()


def maker(path: str) -> Callable[..., Any]:
    """The function that ``TABLES`` or ``FIGURES`` names."""
    module, _, name = path.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    return found
