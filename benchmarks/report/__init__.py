"""Reports, which are made from records alone, at any time: what is in one, by name.

In: folders of records. Out: tables (CSV, Parquet, Markdown, LaTeX, HTML), figures and one page.
Read ``frame`` (a record becomes a row of a DataFrame), ``display`` (labels and rounding), ``table``
and ``style`` (how tables and figures look), the modules that are named below, and ``write``, which
puts a report together.
``compare`` holds two sets of runs together, and ``trackers`` sends records to services that collect
experiments. A new table or figure is a function and a line here.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Section:
    """What stands below one heading of the page: tables by name, each a function (rows, options) ->
    Table, and figures, each a function (rows, options) -> Pictures. They are named by their module
    here, so that ``--help`` imports neither pandas nor matplotlib."""

    tables: Mapping[str, str] = field(default_factory=dict)
    figures: tuple[str, ...] = ()


# By heading, in the order of the page. The table of a paper stands above them all.
SECTIONS = {
    "Throughput": Section({"throughput": "tables:throughput_table"}, ("charts:throughput_bars",)),
    "Speed-up": Section({"speedup": "speedup:speedup_table"}, ("speedup:speedup_maps",)),
    "Ablations": Section({"ablation": "speedup:ablation_table"}, ("speedup:ablation_figure",)),
    "Scaling": Section({"scaling": "tables:scaling_table"}, ("charts:scaling_curves",)),
    "Memory": Section(
        {"memory": "tables:memory_table"},
        ("charts:memory_bars", "charts:memory_breakdown"),
    ),
    "Timelines": Section(figures=("timelines:step_timelines",)),
    "Loss": Section(figures=("charts:loss_curves",)),
    "Attempts": Section({"attempts": "tables:attempts_table"}),
    "Evidence": Section(
        {"evidence": "evidence:evidence_table", "published": "evidence:published_table"},
        ("evidence:evidence_distance_figure", "evidence:published_figure"),
    ),
}
TABLES = {"paper": "tables:paper_table"} | {
    name: path for section in SECTIONS.values() for name, path in section.tables.items()
}


@dataclass(frozen=True)
class Options:
    """Options of a report: the contender over which speed-ups are given, the knobs of the
    configuration that ablations are ``against``, whether to draw every timeline, the contenders and
    columns of the paper's table (empty: all), and whether to write figures as PDF, too."""

    base: str = "deepspeed_3d"
    against: Mapping[str, str] = field(default_factory=dict)
    timelines: bool = False
    contenders: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    pdf: bool = False

    def over(self, rows: Any) -> Options:
        """The options with DeepSpeed's other plans as the base where none of the rows is 3D."""
        names = set(rows["contender"])
        is_other = self.base == DEFAULTS.base and self.base not in names and "deepspeed" in names
        return replace(self, base="deepspeed") if is_other else self


DEFAULTS = Options()


def maker(path: str) -> Callable[..., Any]:
    """The function that a section names."""
    module, _, name = path.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    return lambda rows, options: function(rows, options.over(rows))
