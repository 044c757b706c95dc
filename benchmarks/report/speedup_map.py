"""Maps of speed-ups over models and GPU counts, one map per contender."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.colors import LinearSegmentedColormap, TwoSlopeNorm
from matplotlib.figure import Figure

from benchmarks.report import style, words
from benchmarks.report.frame import CELL, best_or_failed
from benchmarks.report.pairs import BASE, paired_speedups
from benchmarks.report.picture import Picture, by_evidence

MAX_LINES = 16  # lines of a map; the table has all
_DIVERGING = LinearSegmentedColormap.from_list("speedup", [style.WARM, "#f7f7f7", style.COOL])


def speedup_maps(rows: pd.DataFrame, base: str = BASE) -> Iterator[Picture]:
    """Throughput divided by the base's, for models and GPU counts: one map per contender other than
    the base. Cells in which either of the two failed say so."""
    pairs = paired_speedups(rows, base)
    if pairs.empty:
        return
    failed = _failures(rows, base)
    over = words.contender_label(base)
    for suffix, said, mine in by_evidence(pairs):
        reach = max(0.1, float(np.abs(np.log2(mine["speedup"].to_numpy(dtype=float))).max()))
        for contender in style.ordered(mine["contender"]):
            label = words.contender_label(contender)
            kinds = ["evidence", "basis", "cluster", "contender"]
            ours = mine[mine["contender"] == contender]
            lost = failed.merge(ours[kinds].drop_duplicates(), on=kinds)
            yield Picture(
                section="Speed-up",
                name=f"speedup_{contender}_{suffix}",
                caption=f"Throughput of {label} over {over} in the same cell, {said}. Above 1 "
                f"{label} is faster" + _doubts(mine),
                figure=_map(pd.concat([ours, lost]), f"{label} over {over}, × throughput", reach),
                shown=style.shown(ours),
            )


def _failures(rows: pd.DataFrame, base: str) -> pd.DataFrame:
    """The cells in which the base or a contender failed; ``text`` says which one and how."""
    best = best_or_failed(rows)
    bases = best[best["contender"] == base]
    both = best[best["contender"] != base].merge(bases, on=CELL, suffixes=("", "_base"))
    both = both[(both["status"] != "ok") | (both["status_base"] != "ok")]
    over = words.contender_label(base)
    texts = [
        words.status_label(row["status"])
        if row["status"] != "ok"
        else f"{over}\n{words.status_label(row['status_base'])}"
        for row in both.to_dict("records")
    ]
    kept = both[[*CELL, "contender", "on_cpu", "parameters"]]
    return kept.assign(text=texts, speedup=np.nan)


def _doubts(rows: pd.DataFrame) -> str:
    """The caption's words on intervals and doubts, for maps of measured ratios."""
    if rows["evidence"].iloc[0] != "measured":
        return "."
    return (
        "; in brackets the 95 % bootstrap interval. ~ marks a ratio whose interval includes 1 or "
        "whose samples spread too far to say."
    )


def _text(row: Mapping[Any, Any]) -> str:
    if isinstance(row.get("text"), str):
        return str(row["text"])
    number = ("~" if row["unsure"] is True else "") + words.ratio(row["speedup"])
    low, high = row["speedup_low"], row["speedup_high"]
    return number if np.isnan(low) else f"{number}\n[{words.ratio(low)}, {words.ratio(high)}]"


def _map(rows: pd.DataFrame, title: str, reach: float) -> Figure:
    """Draw one map. ``reach`` is the logarithm (base 2) of the ratio at the ends of the colour
    scale, which is the same for all contenders."""
    table = rows.sort_values(["parameters", "model", "global_batch"], kind="stable")
    names = table["model"].map(words.model_label)
    table = table.assign(
        line=names + ", batch " + table["global_batch"].astype(str),
        shown=[_text(row) for row in table.to_dict("records")],
    ).drop_duplicates(["line", "num_gpus"], keep="last")
    lines = table["line"].unique()[:MAX_LINES]
    values, texts = (
        table.pivot(index="line", columns="num_gpus", values=name).reindex(lines)
        for name in ("speedup", "shown")
    )
    size = (2.6 + 0.95 * values.shape[1], 1.2 + 0.48 * values.shape[0])
    figure, axis = plt.subplots(figsize=size, layout="constrained")
    norm = TwoSlopeNorm(0.0, -reach, reach)
    logs = np.log2(values.to_numpy(dtype=float))
    image = axis.imshow(logs, cmap=_DIVERGING, norm=norm, aspect="auto")
    axis.set_facecolor("#e4e4e4")  # cells that failed
    for (i, j), text in np.ndenumerate(texts.to_numpy()):
        if isinstance(text, str):
            ink = "white" if abs(logs[i, j]) > 0.6 * reach else "black"
            drawn = axis.text(j, i, text, ha="center", va="center", fontsize=8.5, color=ink)
            drawn.set_in_layout(False)
    axis.set_xticks(range(values.shape[1]), [str(count) for count in values.columns])
    axis.set_yticks(range(values.shape[0]), list(values.index))
    axis.set_xlabel(f"{words.worker_word(rows)}s")
    axis.set_title(title)
    axis.grid(False)
    bar = figure.colorbar(image, ax=axis, format=lambda x, _: f"{2**x:.2f}")
    bar.set_label("speed-up")
    return figure
