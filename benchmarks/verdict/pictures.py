"""The pictures of the verdict, from the judged cells."""

from __future__ import annotations

from dataclasses import fields

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from benchmarks.report import display, style
from benchmarks.report.charts import Picture, time_breakdown
from benchmarks.verdict.assumptions import ASSUMPTIONS
from benchmarks.verdict.cells import CELL
from benchmarks.verdict.judge import (
    BASELINES,
    CLAIM,
    LABELS,
    OPPONENTS,
    with_shared_plans,
)
from benchmarks.verdict.uncertainty import Array, Uncertainty
from zeropp.price.lost_time import TimeBreakdown


def pictures_of(
    plans: pd.DataFrame, verdicts: pd.DataFrame, uncertainty: Uncertainty
) -> list[Picture]:
    """All pictures of the verdict."""
    best = verdicts[(verdicts["mode"] == "best") & (verdicts["bandwidth"] == 1)]
    return [_speedups(best), assumptions_picture(uncertainty), _losses(plans)]


def _losses(plans: pd.DataFrame) -> Picture:
    """What every row's best plan loses against the compute limit, one bar per row, in the cell
    whose inter-node bandwidth is varied, or else in the first one."""
    best = with_shared_plans(plans[(plans["mode"] == "best") & plans.limit_s.notna()])
    drawn = best.sort_values("bandwidth", key=lambda share: share == 1, kind="stable").iloc[0]
    same = [name for name in CELL if name != "bandwidth"]
    own = best[(best[same] == drawn[same]).all(axis=1) & (best.bandwidth == 1.0)]
    kinds = [kind.name for kind in fields(TimeBreakdown)]
    bars = {
        LABELS[row["contender"]]: {kind: row[f"{kind}_s"] for kind in kinds}
        for row in own.to_dict("records")
    }
    sequences, gpus = drawn["global_batch"] // drawn["num_gpus"], drawn["num_gpus"]
    model, cluster = display.model_label(drawn["model"]), display.cluster_label(drawn["cluster"])
    place = f"{model} on {gpus} {cluster}, best plans, simulated"
    words = f"{sequences} sequence{'' if sequences <= 1 else 's'} per GPU"
    return time_breakdown({words: bars}, "losses", place)


def _speedups(cells: pd.DataFrame) -> Picture:
    """Draw one dot per cell, with one line per contender other than ZeroPP and bars at medians."""
    names = list(BASELINES)
    batches = sorted(cells.sequences_per_gpu.unique())
    figure, axis = plt.subplots(figsize=(9.0, 5.4), layout="constrained")
    for place, name in enumerate(reversed(names)):
        for shift, batch in enumerate(batches):
            height = place + 0.25 * (1 - shift)
            values = cells[cells.sequences_per_gpu == batch][f"speedup_over_{name}"].dropna()
            plural = "" if batch == 1 else "s"
            label = f"{batch:g} sequence{plural} per GPU and step" if place == 0 else None
            axis.plot(values, [height] * len(values), "o", ms=4, alpha=0.5, color=f"C{shift}")
            axis.plot([values.median()], [height], "|", ms=14, mew=2.5, color=f"C{shift}")
            axis.plot([], [], "o", color=f"C{shift}", label=label)
    axis.set_yticks(range(len(names)), [BASELINES[name] for name in reversed(names)])
    axis.axvline(1.0, color="black", linewidth=0.8)
    axis.axvline(CLAIM, color="black", linewidth=0.8, linestyle=":")
    axis.set_xlabel("speed of ZeroPP over that of ... (dotted: the claim, 1.33)")
    title = "ZeroPP at its best plan over every program at its own: simulated, one dot per case"
    axis.set_title(title, fontsize=10)
    axis.legend(loc="lower right", fontsize=8)
    return Picture(name="speedups", caption=title, figure=figure)


def assumptions_picture(uncertainty: Uncertainty) -> Picture:
    """How far each constant moves the median ratio: a bar from one end of its range to the other,
    the longest on top (a tornado chart), with a panel per opponent and batch on one scale."""
    moved = {name: uncertainty.moved_medians(name) for name in OPPONENTS}
    groups = list(moved[OPPONENTS[0]])
    changes = np.array(
        [
            [
                np.subtract(moved[name][words], uncertainty.medians[name][words].value)
                for words in groups
            ]
            for name in OPPONENTS
        ]
    )  # opponent, batch, assumption, end
    order = np.argsort(np.abs(changes).max(axis=(0, 1, 3)))
    figure, axes = plt.subplots(
        len(groups), len(OPPONENTS), figsize=(10.0, 5.6), layout="constrained", sharey=True
    )
    for (line, column), axis in np.ndenumerate(axes):
        name, words = OPPONENTS[column], groups[line]
        simulated = uncertainty.medians[name][words].value
        _bars(axis, simulated, changes[column, line][order], reach=1.15 * np.abs(changes).max())
        axis.set_title(BASELINES[name] if line == 0 else "", fontsize=9)
        axis.set_ylabel(words if column == 0 else "")
        axis.tick_params(labelsize=8)
    axes[0, 0].set_yticks(range(len(order)), [ASSUMPTIONS[n].label for n in order])
    figure.supxlabel(
        "median speed of ZeroPP over that of the opponent (dotted: the same)", fontsize=9
    )
    title = (
        "The median with one constant at the low end (orange) or the high end (blue) of its range: "
        "simulated, best plans"
    )
    figure.suptitle(title, fontsize=10)
    return Picture(name="assumptions", caption=title, figure=figure)


def _bars(axis: Axes, simulated: float, changes: Array, *, reach: float) -> None:
    """Draw the bars of one panel, which change the ``simulated`` median by ``changes``; the axis
    ends at ``reach`` from it."""
    for end, colour in enumerate((style.WARM, style.COOL)):
        axis.barh(range(len(changes)), changes[:, end], left=simulated, color=colour, height=0.7)
    axis.axvline(simulated, color="black", linewidth=0.8)
    axis.axvline(1.0, color="black", linewidth=0.8, linestyle=":")
    axis.set_xlim(simulated - reach, simulated + reach)
    axis.grid(axis="x")
