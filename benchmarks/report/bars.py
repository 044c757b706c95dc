"""Bar charts of throughput and memory: groups by model and GPU count, a bar a contender."""

from __future__ import annotations

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.report import style
from benchmarks.report.frame import latest_ok

_KINDS = {
    "allocated": "peak allocated memory of the fullest rank [GiB]",
    "resident": "peak resident memory of the fullest rank\nabove its start [GiB]",
    "predicted": "predicted peak memory of the fullest rank [GiB]",
}


def throughput_bars(frame: pd.DataFrame) -> Figure | None:
    """Tokens a second and GPU with 95 % intervals; None where nothing succeeded."""
    rows = _successes(frame, "tokens_per_s_per_gpu")
    return None if rows.empty else _bars(rows, "tokens_per_s_per_gpu", "tokens/s/GPU", ",.0f")


def memory_bars(frame: pd.DataFrame) -> Figure | None:
    """Peak memory of the fullest rank; None where none is known."""
    rows = _successes(frame, "peak_gib")
    if rows.empty:
        return None
    kinds = rows["memory_kind"].unique()
    label = _KINDS[kinds[0]] if len(kinds) == 1 else "peak memory of the fullest rank [GiB]"
    return _bars(rows, "peak_gib", label, ".2f")


def _successes(frame: pd.DataFrame, column: str) -> pd.DataFrame:
    rows = latest_ok(frame)
    if rows.empty or column not in rows:
        return pd.DataFrame()
    return rows[(rows["status"] == "ok") & rows[column].notna()]


def _bars(rows: pd.DataFrame, column: str, label: str, form: str) -> Figure:
    """One panel a model, so that models of different size do not share a scale."""
    models = list(dict.fromkeys(rows.sort_values("num_gpus")["model"]))
    with style.applied():
        figure, axes = plt.subplots(
            1, len(models), figsize=(1.2 + 3.6 * len(models), 3.6), squeeze=False
        )
        for axis, model in zip(axes[0], models, strict=True):
            _panel(axis, rows[rows["model"] == model], column, form)
            axis.set_title(model)
        axes[0][0].set_ylabel(label)
        handles, labels = axes[0][0].get_legend_handles_labels()
        figure.legend(
            handles, labels, loc="upper center", ncols=len(labels), bbox_to_anchor=(0.5, 1.07)
        )
        evidence = ", ".join(sorted(rows["evidence"].unique()))
        clusters = ", ".join(sorted(rows["cluster"].unique()))
        figure.text(0.5, -0.04, f"{evidence} on {clusters}", ha="center", color="#555555", size=8)
        figure.tight_layout()
    return figure


def _panel(axis: Axes, rows: pd.DataFrame, column: str, form: str) -> None:
    counts = sorted(rows["num_gpus"].unique())
    contenders = sorted(rows["contender"].unique(), reverse=True)
    width = 0.8 / len(contenders)
    for number, contender in enumerate(contenders):
        mine = rows[rows["contender"] == contender].drop_duplicates("num_gpus", keep="last")
        mine = mine.set_index("num_gpus").reindex(counts)
        places = np.arange(len(counts)) + (number - (len(contenders) - 1) / 2) * width
        values = mine[column].to_numpy(dtype=float)
        errors = None
        if f"{column}_low" in mine:
            low, high = mine[f"{column}_low"], mine[f"{column}_high"]
            errors = np.abs(np.array([values - low, high - values], dtype=float))
        bars = axis.bar(
            places,
            values,
            width * 0.92,
            yerr=errors,
            label=contender,
            color=style.colour(contender),
            hatch=style.hatch(contender),
            edgecolor="white",
            error_kw={"elinewidth": 1, "capsize": 2, "ecolor": "#333333"},
        )
        texts = ["" if np.isnan(value) else format(value, form) for value in values]
        axis.bar_label(bars, texts, padding=3, fontsize=8)
    axis.set_xticks(np.arange(len(counts)), [str(count) for count in counts])
    axis.set_xlabel("ranks")
    axis.set_ylim(bottom=0)
    axis.margins(y=0.15)
