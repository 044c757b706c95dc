"""Ablations: how every change of a knob changes speed and memory against one base configuration.

It takes the rows of ``latest_ok``. Where a contender ran in several configurations of one cell,
every knob that differs between them is a factor. All configurations are shown, slow ones, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.report import DEFAULTS, Options, display, style
from benchmarks.report.charts import Picture
from benchmarks.report.frame import CELL, default_knobs
from benchmarks.report.speedup import SPEEDUP, speedup_of
from benchmarks.report.table import MISSING, Column, Table, key_columns, table
from benchmarks.specification import SpecError

MAX_GROUPS = 6  # panels of a figure; the table has all
_GROUP = [*CELL, "contender"]
_NAMES = ["change", "is_base", "knobs_text", *_GROUP, "on_cpu", "layout", "status", "reason"]
_NAMES += [
    f"{name}{end}" for name in ("step_s", "tokens_per_s_per_gpu") for end in ("", "_low", "_high")
]
_NAMES += ["speedup", "speedup_low", "speedup_high", "speedup_unsettled"]
_NAMES += ["peak_gib", "memory_ratio"]


def ablations(rows: pd.DataFrame, against: Mapping[str, str]) -> pd.DataFrame:
    """One row per configuration, for every contender and cell with several of them, the base first.

    Columns are ``change`` (in words), ``speedup`` over the base and ``memory_ratio``. ``against``
    gives knobs of the base, such as ``{"unit": "8"}``; if it is empty the base is the configuration
    that differs least from the contender's defaults. Raises SpecError if no configuration has
    those knobs.
    """
    groups = [group for _, group in rows.groupby(_GROUP, sort=False) if len(group) > 1]
    lines: list[dict[Any, Any]] = []
    for group in groups:
        members: list[dict[Any, Any]] = group.to_dict("records")
        base = _base(members, against)
        if base is not None and any(member["knobs"] for member in members):
            lines += _lines(members, base)
    if against and not lines:
        asked = " ".join(f"{k}={v}" for k, v in against.items())
        raise SpecError(f"--against {asked}: no configuration has these knobs; {_varied(groups)}")
    return pd.DataFrame(lines, columns=[*_NAMES, "record_id"])


def _varied(groups: list[pd.DataFrame]) -> str:
    """Which knobs differ somewhere, with their values."""
    values: dict[str, dict[str, None]] = {}
    for group in groups:
        for knobs in group["knobs"]:
            for name, value in knobs.items():
                values.setdefault(name, {})[str(value)] = None
    varied = [f"{name} {'|'.join(texts)}" for name, texts in values.items() if len(texts) > 1]
    return f"there are {', '.join(varied)}" if varied else "nothing was varied"


def _base(members: list[dict[Any, Any]], against: Mapping[str, str]) -> dict[Any, Any] | None:
    """The member that the others are compared with, among those with the knobs of ``against``: a
    success rather than a failure, then the one that differs least from the contender's defaults.
    None if no member has the knobs."""
    fine = [
        member
        for member in members  # a unit that the planner cut counts as what was asked
        if all(
            str(member["knobs"].get(name)).split(" (")[0].lower() == value.lower()
            for name, value in against.items()
        )
    ]
    plain = default_knobs(members[0]["contender"])

    def distance(member: dict[Any, Any]) -> tuple[bool, int]:
        knobs = member["knobs"]
        apart = sum(knobs[name] not in ("auto", plain.get(name, knobs[name])) for name in knobs)
        return member["status"] != "ok", apart

    return min(fine, key=distance, default=None)


def _lines(members: list[dict[Any, Any]], base: dict[Any, Any]) -> Iterator[dict[Any, Any]]:
    others = [member for member in members if member is not base]
    others.sort(key=lambda member: _change(member["knobs"], base["knobs"]).count("→"))
    for member in (base, *others):
        yield (
            member
            | speedup_of(member, base)
            | {
                "change": _change(member["knobs"], base["knobs"]) or "base",
                "is_base": member is base,
                "knobs_text": " ".join(f"{k}={v}" for k, v in member["knobs"].items()),
            }
        )


def _change(knobs: Mapping[str, Any], base: Mapping[str, Any]) -> str:
    """The knobs that differ from the base's, as ``unit 8 → 16``."""
    names = dict.fromkeys([*base, *knobs])
    return ", ".join(
        f"{name} {base.get(name)} → {knobs.get(name)}"
        for name in names
        if knobs.get(name) != base.get(name)
    )


def ablation_table(rows: pd.DataFrame, options: Options = DEFAULTS) -> Table:
    """The table of ablations: throughput, speed-up and memory of every configuration and its
    base."""
    configurations = ablations(rows, options.against)
    worker, memory = display.worker_word(rows), display.memory_unit(configurations["peak_gib"])
    columns = (
        *(column for column in key_columns(rows) if column.name != "basis"),
        Column("change", "change"),
        Column("layout", "configuration"),
        Column("step_s", "step [s]", form=display.seconds, interval=True, instead="status"),
        Column("tokens_per_s_per_gpu", f"tokens/s/{worker}", form=display.tokens, interval=True),
        replace(SPEEDUP, head="over the base"),
        Column("peak_gib", f"peak [{memory.name}]", form=memory.form),
        Column("memory_ratio", "peak over the base's", form=display.ratio),
        Column("reason", "note"),
        Column("is_base", "is the base", hidden=True),
        Column("knobs_text", "knobs", hidden=True),
        Column("status", "status", hidden=True),
    )
    caption = "Every configuration that was run, against the one called base in the same cell."
    return table("ablation", "Ablations", columns, configurations, caption=caption)


def ablation_figure(rows: pd.DataFrame, options: Options = DEFAULTS) -> Iterator[Picture]:
    """Throughput and peak memory of every configuration, divided by the base's: one row of panels
    per contender and cell."""
    clusters = ablations(rows, options.against).groupby(["evidence", "cluster"], sort=True)
    for (evidence, cluster), cluster_rows in clusters:
        groups = [group for _, group in cluster_rows.groupby(_GROUP, sort=False)][:MAX_GROUPS]
        more = cluster_rows.groupby(_GROUP).ngroups - len(groups)
        yield Picture(
            name=f"ablation_{evidence}_{cluster}".replace(" ", "_"),
            caption="Throughput and peak memory of every configuration over those of its base, "
            f"{evidence} on {display.cluster_label(str(cluster))}."
            + (f" The table has {more} more groups." if more else ""),
            figure=_panels(groups),
            shown=style.shown(cluster_rows),
        )


def _panels(groups: list[pd.DataFrame]) -> Figure:
    heights = [len(group) + 1.5 for group in groups]
    memory = display.memory_unit(peak for group in groups for peak in group["peak_gib"])
    mean = 0.3 * sum(heights) / len(heights) + 0.4
    figure, axes = style.panels(2 * len(groups), 2, width=5.6, height=mean, heights=heights)
    for number, group in enumerate(groups):
        left, right = axes[2 * number : 2 * number + 2]
        _bars(left, group=group, ratio="speedup", value="tokens_per_s_per_gpu", form=display.tokens)
        _bars(right, group=group, ratio="memory_ratio", value="peak_gib", form=memory.form)
        first = group.iloc[0]
        contender = display.contender_label(first["contender"])
        left.set_title(
            f"{contender}, {display.model_label(first['model'])}, "
            f"{first['num_gpus']} {display.worker_word(group)}s, batch {first['global_batch']}",
            loc="left",
        )
        right.set_yticklabels([])
    axes[-2].set_xlabel("throughput over the base's (tokens/s each)")
    axes[-1].set_xlabel(f"peak memory over the base's ({memory.name})")
    return figure


def _bars(axis: Axes, *, group: pd.DataFrame, ratio: str, value: str, form: display.Form) -> None:
    places = range(len(group))
    ratios = group[ratio].to_numpy(dtype=float)
    colours = [
        style.NEUTRAL if base else style.colour(group["contender"].iloc[0])
        for base in group["is_base"]
    ]
    axis.barh(list(places), np.nan_to_num(ratios), 0.7, color=colours)
    for place, row in zip(places, group.to_dict("records"), strict=True):
        number = row[ratio]
        failed = row["status"] != "ok"
        text = display.status_label(row["status"]) if failed else MISSING
        if not display.is_missing(number) and not failed:
            text = f"{display.ratio(number)}  ({form(row[value])})"
        axis.text(
            0 if failed or display.is_missing(number) else number,
            place,
            f" {text}",
            va="center",
            fontsize=8,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0},  # over the line of 1
        )
    axis.set_yticks(list(places), list(group["change"]), fontsize=8)
    axis.invert_yaxis()
    axis.axvline(1.0, color="#333333", linewidth=0.8)
    axis.margins(x=0.35)
    axis.set_xlim(left=0)
    axis.grid(visible=False)
