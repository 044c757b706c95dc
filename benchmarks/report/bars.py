"""Bar charts of throughput and of memory.

There is one panel per model and batch, in it one group of bars per GPU count, and one bar per
contender in its fastest configuration. If none succeeded, a word says why.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter

from benchmarks.report import style, words
from benchmarks.report.frame import best_or_failed
from benchmarks.report.picture import PANEL, Picture, by_evidence, panel_title

MAX_PANELS = 6  # nobody reads a figure with more

_MEMORY = {
    "allocated": "peak allocated, fullest {worker} [GiB]",
    "resident": "peak resident above start,\nfullest {worker} [GiB]",
    "predicted": "predicted peak, fullest {worker} [GiB]",
}


def bars(rows: pd.DataFrame) -> Iterator[Picture]:
    """One figure of throughput and one of memory per kind of evidence and cluster."""
    for suffix, said, mine in by_evidence(best_or_failed(rows)):
        worker = words.worker_word(mine)
        if mine["tokens_per_s_per_gpu"].notna().any():
            yield Picture(
                section="Throughput",
                name=f"throughput_{suffix}",
                caption=f"Tokens per second and {worker}, {said}{_intervals(mine)}."
                f"{_left_out(mine)}",
                figure=_panels(mine, "tokens_per_s_per_gpu", f"tokens/s/{worker}", words.tokens),
                shown=style.shown(mine),
            )
        for kind, known in mine[mine["peak_gib"].notna()].groupby("memory_kind"):
            yield Picture(
                section="Memory",
                name=f"memory_{suffix}_{kind}",
                caption=f"Peak memory of the fullest {worker} ({kind}), {said}.{_left_out(known)}",
                figure=_panels(
                    known, "peak_gib", _MEMORY[str(kind)].format(worker=worker), words.gib
                ),
                shown=style.shown(known),
            )


def _intervals(rows: pd.DataFrame) -> str:
    """The words that explain error bars, which only measured values have."""
    measured = rows["evidence"].iloc[0] == "measured"
    return ": medians with 95 % bootstrap intervals" if measured else ""


def _left_out(rows: pd.DataFrame) -> str:
    panels = rows.groupby(PANEL).ngroups
    return f" The first {MAX_PANELS} of {panels} panels." if panels > MAX_PANELS else ""


def _panels(rows: pd.DataFrame, column: str, label: str, form: words.Form) -> Figure:
    """One panel per model and batch, each with a scale of its own."""
    groups = [panel for _, panel in rows.groupby(PANEL, sort=False)][:MAX_PANELS]
    figure, axes = style.panels(len(groups))
    for number, (axis, panel) in enumerate(zip(axes, groups, strict=True)):
        _bars(axis, panel, column, form)
        axis.set_title(panel_title(panel))
        axis.set_xlabel(f"{words.worker_word(panel)}s")
        if number % style.COLUMNS == 0:
            axis.set_ylabel(label)
    style.legend(figure, axes)
    return figure


def _bars(axis: Axes, rows: pd.DataFrame, column: str, form: words.Form) -> None:
    counts = sorted(rows["num_gpus"].unique())
    contenders = style.ordered(rows["contender"])
    width = 0.84 / len(contenders)
    turn = 90 if len(counts) * len(contenders) > 6 else 0
    for number, contender in enumerate(contenders):
        mine = rows[rows["contender"] == contender].set_index("num_gpus").reindex(counts)
        places = np.arange(len(counts)) + (number - (len(contenders) - 1) / 2) * width
        values = mine[column].to_numpy(dtype=float)
        drawn = axis.bar(
            places,
            np.nan_to_num(values),
            width * 0.92,
            yerr=errors(mine, column),
            label=words.contender_label(contender),
            color=style.colour(contender),
            hatch=style.hatch(contender),
            edgecolor="white",
            error_kw={"elinewidth": 1, "capsize": 2, "ecolor": "#333333"},
        )
        texts = [_text(v, s, form) for v, s in zip(values, mine["status"], strict=True)]
        # The text lies inside the panel, so it must not change the arrangement of the figure.
        axis.bar_label(drawn, texts, padding=3, fontsize=8, rotation=turn, in_layout=False)
    axis.set_xticks(np.arange(len(counts)), [str(count) for count in counts])
    axis.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axis.margins(y=0.35 if turn else 0.22)
    axis.set_ylim(bottom=0)


def _text(value: float, status: object, form: words.Form) -> str:
    """The number above a bar, or a word such as ``OOM`` if there is no bar."""
    if not np.isnan(value):
        over = status not in ("ok", None)  # the predicted peak is larger than the device's memory
        return f"{form(value)} {words.status_label(str(status))}" if over else form(value)
    return words.status_label(str(status)) if isinstance(status, str) and status != "ok" else ""


def errors(rows: pd.DataFrame, column: str) -> np.ndarray | None:
    """The distances of the intervals' ends from the values, [2, rows]; None if there are none."""
    if f"{column}_low" not in rows or not rows[f"{column}_low"].notna().any():
        return None
    low, high = rows[f"{column}_low"], rows[f"{column}_high"]
    ends = np.array([rows[column] - low, high - rows[column]], dtype=float)
    distances: np.ndarray = np.nan_to_num(np.maximum(ends, 0.0))
    return distances
