"""Stacked bars: what the time of a step is spent on, and the memory of the fullest rank by kind."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.report import DEFAULTS, Options, style
from benchmarks.report.charts import MAX_PANELS, PANEL, Picture, by_evidence, panel_title
from benchmarks.report.frame import CELL, best_configuration

# Paul Tol's "muted" and similar colours, with hatches, unlike the colours of contenders.
_CAUSES = {
    "limit": ("compute limit", "#DDDDDD", ""),
    "small_kernels": ("small kernels", "#999999", ""),
    "recomputation": ("recomputation", "#882255", ""),
    "imbalance": ("imbalance of stages", "#AA4499", "//"),
    "bubble": ("bubble", "#CC6677", ""),
    "slow_nodes": ("slow nodes", "#661100", ""),
    "copies": ("copies", "#DDCC77", ".."),
    "tensor": ("tensor parallelism", "#999933", "//"),
    "transfers": ("transfers", "#117733", ""),
    "reductions": ("exposed reductions", "#44AA99", "xx"),
    "gathers": ("exposed gathers", "#88CCEE", "//"),
    "optimizer": ("optimizer", "#332288", ""),
}


# Per contender, the seconds of its step: the compute limit, and above it what is lost by cause
# (``zeropp.sim.lost_time``).
StepSeconds = Mapping[str, Mapping[str, float]]


def time_breakdown(panels: Mapping[str, StepSeconds], name: str, caption: str) -> Picture:
    """One panel per title that has a contender, with one stacked bar per contender, the fastest
    first, in multiples of the step at the compute limit. Raises ValueError if no panel has any."""
    panels = {title: steps for title, steps in panels.items() if steps}
    if not panels:
        raise ValueError("time_breakdown: no panel has a contender")
    lines = [len(steps) + 1.0 for steps in panels.values()]
    height = 0.4 + 0.36 * sum(lines) / len(lines)
    figure, axes = style.panels(len(panels), columns=1, width=9.0, height=height, heights=lines)
    for axis, (title, seconds) in zip(axes, panels.items(), strict=True):
        _bars(axis, seconds)
        axis.set_title(title)
    axes[-1].set_xlabel("step, in multiples of the compute limit's (dashed)")
    style.legend(figure, axes)
    return Picture(
        section="Compute limit", name=name, caption=caption, figure=figure, shown=caption
    )


def _bars(axis: Axes, seconds: StepSeconds) -> None:
    steps = {name: sum(kinds.values()) / kinds["limit"] for name, kinds in seconds.items()}
    contenders = sorted(steps, key=steps.__getitem__)
    places = np.arange(len(contenders))
    right, left = np.zeros(len(contenders)), np.zeros(len(contenders))
    for kind, (label, colour, hatch) in _CAUSES.items():
        mine = [seconds[name] for name in contenders]
        sizes = np.array([kinds.get(kind, 0.0) / kinds["limit"] for kinds in mine])
        if not sizes.any():
            continue
        start = np.where(sizes >= 0, right, left)
        look: dict[str, Any] = {"label": label, "color": colour, "hatch": hatch}
        axis.barh(places, sizes, 0.75, start, **look, edgecolor="white", linewidth=0.4)
        right, left = right + np.maximum(sizes, 0), left + np.minimum(sizes, 0)
    for place, end, name in zip(places, right, contenders, strict=True):
        text = f"{100 / steps[name]:.0f} % of the limit"
        axis.annotate(
            text, (end, place), (4, 0), textcoords="offset points", va="center", fontsize=8
        )
    axis.axvline(1.0, color="black", linewidth=0.8, linestyle="--")
    axis.set_yticks(places, contenders, fontsize=8.5)
    axis.set_xlim(min(0.0, left.min()), 1.2 * right.max())
    axis.set_ylim(len(contenders) - 0.5, -0.5)
    axis.grid(visible=False)


# Paul Tol's "muted", with hatches, so that the stack is not mistaken for contenders.
_MEMORY = {
    "parameters": ("#332288", ""),
    "unsharded": ("#88CCEE", "//"),
    "gradients": ("#117733", ""),
    "optimizer": ("#DDCC77", ".."),
    "activations": ("#882255", ""),
    "workspace": ("#BBBBBB", "xx"),
}


def memory_breakdown(rows: pd.DataFrame, options: Options = DEFAULTS) -> Iterator[Picture]:
    """The fullest rank's bytes by kind, of configurations for which a plan predicts them or a trace
    counted them."""
    traced = rows[rows["evidence"].str.startswith("traced") & (rows["status"] == "ok")]
    traced = traced.drop_duplicates([*CELL, "contender"], keep="last")  # no step to choose by
    best = pd.concat([best_configuration(rows), traced])
    best = best[best["memory_by_kind"].map(len) > 0]
    for suffix, said, mine in by_evidence(best):
        kind = "Traced" if mine["evidence"].iloc[0] == "traced" else "Predicted"
        yield Picture(
            section="Memory",
            name=f"memory_by_kind_{suffix}",
            caption=f"{kind} memory of the fullest rank by kind and in all, tensors alone, for the "
            f"configurations {said}; the dashed line is what the device has.{_diamond(mine)}",
            figure=_panels(mine),
            shown=style.shown(mine),
        )


def _diamond(rows: pd.DataFrame) -> str:
    """The words that explain the marks of measured peaks; empty if there are none."""
    kinds = " or ".join(sorted(set(rows["memory_kind"]) - {"predicted", ""}))
    pages = " Resident memory is pages of the whole process, so more than its tensors."
    said = f" The diamond is the measured peak ({kinds})."
    return (said + pages * ("resident" in kinds)) if kinds else ""


def _panels(rows: pd.DataFrame) -> Figure:
    groups = [panel for _, panel in rows.groupby(PANEL, sort=False)][:MAX_PANELS]
    figure, axes = style.panels(len(groups), columns=2, width=6.0, height=3.8)
    for number, (axis, panel) in enumerate(zip(axes, groups, strict=True)):
        _stacks(axis, panel)
        axis.set_title(panel_title(panel))
        if number % 2 == 0:
            axis.set_ylabel(f"tensors of the fullest {style.worker_word(rows)} [GiB]")
    style.legend(figure, axes)
    return figure


def _stacks(axis: Axes, panel: pd.DataFrame) -> None:
    order = style.ordered(panel["contender"])
    panel = panel.sort_values("contender", key=lambda names: names.map(order.index))
    panel = panel.sort_values("num_gpus", kind="stable")
    groups = panel["num_gpus"].rank(method="dense").to_numpy()
    places, bottom = np.arange(len(panel)) + 0.6 * groups, np.zeros(len(panel))
    for kind, (colour, hatch) in _MEMORY.items():
        gib = np.array([kinds.get(kind, 0) / 2**30 for kinds in panel["memory_by_kind"]])
        if not gib.any():
            continue
        word = "gathered parameters" if kind == "unsharded" else kind
        axis.bar(places, gib, 0.8, bottom, label=word, color=colour, hatch=hatch, edgecolor="white")
        bottom += gib
    measured = panel["memory_kind"] != "predicted"
    peaks = np.where(measured, panel["peak_gib"].astype(float), np.nan)
    if np.isfinite(peaks).any():
        axis.plot(places, peaks, "D", color="black", markersize=4, label="measured peak")
    highest = np.fmax(bottom, peaks)
    texts = [
        f"measured {style.gib(peak)}\npredicted {style.gib(top)}"
        if np.isfinite(peak)
        else style.gib(top)
        for top, peak in zip(bottom, peaks, strict=True)
    ]
    _totals(axis, places, highest, texts)
    _limit(axis, float(panel["memory_limit_gib"].iloc[0]), highest.max())
    names = [f"{style.contender_label(str(r.contender))}, {r.num_gpus}" for r in panel.itertuples()]
    axis.set_xticks(places, names, fontsize=8, rotation=90 if len(names) > 4 else 0)
    for label, contender in zip(axis.get_xticklabels(), panel["contender"], strict=True):
        label.set_color(style.colour(contender))
    axis.set_xlabel(f"contender, {style.worker_word(panel)}s")
    axis.margins(y=0.22)
    axis.set_ylim(bottom=0)


def _totals(axis: Axes, places: np.ndarray, heights: np.ndarray, texts: list[str]) -> None:
    """Write every stack's total and measured peak above both, with a background so that they can be
    read where the limit's line crosses them."""
    for place, height, text in zip(places, heights, texts, strict=True):
        number = axis.annotate(
            text,
            (place, height),
            (0, 4),
            textcoords="offset points",
            ha="center",
            va="bottom",
            fontsize=7.5,
            rotation=90 if len(texts) > 6 else 0,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6},
        )
        number.set_in_layout(False)


def _limit(axis: Axes, limit: float, highest: float) -> None:
    """Draw a line at the device's memory, unless it is far above the ``highest`` bar, which would
    flatten all bars, or not known (NaN)."""
    if np.isnan(limit):
        return
    if limit < 3 * highest:
        axis.axhline(limit, color="black", linestyle="--", linewidth=1)
        axis.annotate(
            f"limit {limit:g} GiB",
            (1.0, limit),
            xycoords=axis.get_yaxis_transform(),
            ha="right",
            va="bottom",
            fontsize=8,
        )
    else:
        axis.set_title(f"limit {limit:g} GiB, not shown", loc="right", fontsize=7, y=0.94)
