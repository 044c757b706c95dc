"""Scaling over GPU counts, and the map of speed-ups over models and GPU counts."""

from __future__ import annotations

from collections.abc import Iterator

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter

from benchmarks.report import style
from benchmarks.report.bars import errors as intervals
from benchmarks.report.frame import best_configuration
from benchmarks.report.headline import REFERENCE
from benchmarks.report.picture import Picture, by_evidence
from benchmarks.report.tables import paired_speedups

MAX_LINES = 16  # of a map; the table has all
_SERIES = ["model", "seq", "precision"]
_DIVERGING = LinearSegmentedColormap.from_list("speedup", [style.WARM, "#f7f7f7", style.COOL])


def scaling_curves(rows: pd.DataFrame) -> Iterator[Picture]:
    """Tokens a second and efficiency over GPUs: strong scaling (batch fixed) and weak (batch
    grows with the GPUs), wherever records cover two GPU counts or more."""
    best = best_configuration(rows)
    if best.empty:
        return
    best = best.assign(batch_per_gpu=best["global_batch"] / best["num_gpus"])
    for suffix, words, mine in by_evidence(best):
        for kind, key in {"strong": "global_batch", "weak": "batch_per_gpu"}.items():
            groups = [
                (_title(panel, key), panel)
                for _, panel in mine.groupby([*_SERIES, key], sort=True)
                if panel["num_gpus"].nunique() > 1
            ][: style.COLUMNS]
            if groups:
                yield Picture(
                    "Scaling",
                    f"scaling_{kind}_{suffix}",
                    f"{kind.capitalize()} scaling, {words}: tokens a second of the whole job, and "
                    "throughput a GPU over that at the contender's smallest GPU count.",
                    _curves(groups),
                )


def _title(panel: pd.DataFrame, key: str) -> str:
    unit = "batch" if key == "global_batch" else "sequences a GPU:"
    return f"{panel['model'].iloc[0]}, {unit} {panel[key].iloc[0]:g}"


def _curves(groups: list[tuple[str, pd.DataFrame]]) -> Figure:
    figure, flat = style.panels(2 * len(groups), columns=len(groups), width=4.6)
    top, bottom = flat[: len(groups)], flat[len(groups) :]
    for upper, lower, (title, panel) in zip(top, bottom, groups, strict=True):
        upper.set_title(title)
        ends: dict[Axes, list[tuple[float, float, str, str]]] = {upper: [], lower: []}
        for contender in style.ordered(panel["contender"]):
            mine = panel[panel["contender"] == contender].sort_values("num_gpus")
            gpus, a_gpu = (mine[c].to_numpy(float) for c in ("num_gpus", "tokens_per_s_per_gpu"))
            errors = intervals(mine, "tokens_per_s_per_gpu")
            look, speed, efficiency = style.line(contender), gpus * a_gpu, 100 * a_gpu / a_gpu[0]
            upper.errorbar(
                gpus, speed, None if errors is None else gpus * errors, capsize=2, **look
            )
            lower.plot(gpus, efficiency, **look)
            for axis, values in ((upper, speed), (lower, efficiency)):
                ends[axis].append((gpus[-1], values[-1], contender, style.colour(contender)))
        lower.margins(y=0.08)
        lower.axhline(100, color=style.NEUTRAL, linewidth=0.8)
        upper.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        for axis, named in ends.items():
            _gpu_axis(axis, sorted(panel["num_gpus"].unique()))
            style.label_ends(axis, named)
        lower.set_xlabel("GPUs (ranks)")
    top[0].set_ylabel("tokens/s")
    bottom[0].set_ylabel("efficiency [%]")
    return figure


def _gpu_axis(axis: Axes, counts: list[int]) -> None:
    axis.set_xscale("log", base=2)
    axis.set_xticks(counts, [str(count) for count in counts])
    axis.minorticks_off()
    axis.set_ylim(bottom=0)


def speedup_maps(rows: pd.DataFrame) -> Iterator[Picture]:
    """Throughput over DeepSpeed 3D's, models by GPU counts, a map for every other contender."""
    pairs = paired_speedups(rows)
    if pairs.empty:
        return
    for suffix, words, mine in by_evidence(pairs):
        reach = max(0.1, float(np.abs(np.log2(mine["speedup"].to_numpy(dtype=float))).max()))
        for contender in style.ordered(mine["contender"]):
            chosen = mine[mine["contender"] == contender]
            yield Picture(
                "Speed-up",
                f"speedup_{contender.lower().replace(' ', '_')}_{suffix}",
                f"Throughput of {contender} over {REFERENCE} in the same cell, {words}. Above 1 "
                f"{contender} is faster" + _doubts(mine),
                _map(chosen, contender, reach),
            )


def _doubts(rows: pd.DataFrame) -> str:
    """How a map of measured ratios says what its samples do not settle."""
    if rows["evidence"].iloc[0] != "measured":
        return "."
    return (
        "; in brackets the 95 % bootstrap interval. ~ marks a ratio whose interval includes 1 or "
        "whose samples spread too far to say."
    )


def _map(rows: pd.DataFrame, contender: str, reach: float) -> Figure:
    """``reach``: the logarithm (base 2) at the ends of the colours, the same for all contenders."""
    table = rows.sort_values(["model", "global_batch"], kind="stable")
    table = table.assign(
        line=table["model"] + ", batch " + table["global_batch"].astype(str),
        text=table["speedup_text"].str.replace(" ", "\n"),  # the interval below the ratio
    ).drop_duplicates(["line", "num_gpus"], keep="last")
    lines = table["line"].unique()[:MAX_LINES]
    values, texts = (
        table.pivot(index="line", columns="num_gpus", values=name).reindex(lines)
        for name in ("speedup", "text")
    )
    size = (2.6 + 0.95 * values.shape[1], 1.2 + 0.48 * values.shape[0])
    figure, axis = plt.subplots(figsize=size, layout="constrained")
    norm = TwoSlopeNorm(0.0, -reach, reach)
    logs = np.log2(values.to_numpy(dtype=float))
    image = axis.imshow(logs, cmap=_DIVERGING, norm=norm, aspect="auto")
    for (i, j), value in np.ndenumerate(values.to_numpy(dtype=float)):
        if not np.isnan(value):
            ink = "white" if abs(np.log2(value)) > 0.6 * reach else "black"
            words = axis.text(
                j, i, str(texts.to_numpy()[i, j]), ha="center", va="center", fontsize=8.5
            )
            words.set(color=ink, in_layout=False)
    axis.set_xticks(range(values.shape[1]), [str(count) for count in values.columns])
    axis.set_yticks(range(values.shape[0]), list(values.index))
    axis.set_xlabel("GPUs (ranks)")
    axis.set_title(f"{contender} over {REFERENCE}, x throughput")
    axis.grid(False)
    bar = figure.colorbar(image, ax=axis, format=lambda x, _: f"{2**x:.2f}")
    bar.set_label("speed-up")
    return figure
