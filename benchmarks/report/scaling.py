"""Curves over GPU counts: throughput and PFLOP/s of the whole job, and scaling efficiency."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter

from benchmarks.report import style, words
from benchmarks.report.bars import errors as intervals
from benchmarks.report.frame import best_configuration
from benchmarks.report.picture import Picture, by_evidence

_SERIES = ["parameters", "model", "seq", "precision"]
_KINDS = {"strong": "global_batch", "weak": "batch_per_gpu"}


def scaling_curves(rows: pd.DataFrame) -> Iterator[Picture]:
    """Tokens per second, model PFLOP/s of all GPUs, and efficiency over the GPU count.

    There are figures for strong scaling (the batch stays the same) and for weak scaling (the batch
    grows with the GPUs), each where there are at least two GPU counts.
    """
    best = best_configuration(rows)
    best = best.assign(batch_per_gpu=best["global_batch"] / best["num_gpus"])
    for suffix, said, mine in by_evidence(best):
        for kind, key in _KINDS.items():
            groups = [
                (_title(panel, key), panel)
                for _, panel in mine.groupby([*_SERIES, key], sort=True, dropna=False)
                if panel["num_gpus"].nunique() > 1
            ]
            if groups:
                worker, kept = words.worker_word(mine), groups[: style.COLUMNS]
                more = f" {len(groups) - len(kept)} more series are left out."
                yield Picture(
                    section="Scaling",
                    name=f"scaling_{kind}_{suffix}",
                    caption=f"{kind.capitalize()} scaling, {said}: tokens per second and model "
                    f"PFLOP/s of the whole job, and throughput per {worker} over that at the "
                    f"contender's smallest {worker} count." + more * (len(groups) > len(kept)),
                    figure=_curves(kept),
                    shown=style.shown(pd.concat([panel for _, panel in kept])),
                )


def _title(panel: pd.DataFrame, key: str) -> str:
    worker = words.worker_word(panel)
    unit = "batch" if key == "global_batch" else f"sequences per {worker}:"
    return f"{words.model_label(panel['model'].iloc[0])}, {unit} {panel[key].iloc[0]:g}"


def _curves(groups: list[tuple[str, pd.DataFrame]]) -> Figure:
    """One column of panels per series: throughput, PFLOP/s if known, efficiency."""
    known = any(panel["model_tflops_per_gpu"].notna().any() for _, panel in groups)
    on_cpu = all(panel["on_cpu"].all() for _, panel in groups)
    lines = ["tokens/s", *(["model PFLOP/s"] if known and not on_cpu else []), "efficiency [%]"]
    figure, flat = style.panels(
        len(lines) * len(groups), columns=len(groups), width=4.6, height=2.8
    )
    for column, (title, panel) in enumerate(groups):
        axes = [flat[line * len(groups) + column] for line in range(len(lines))]
        axes[0].set_title(title)
        for axis, label in zip(axes, lines, strict=True):
            _series(axis, label, panel)
            if column == 0:
                axis.set_ylabel(label)
        axes[-1].set_xlabel(f"{words.worker_word(panel)}s")
    return figure


def _series(axis: Axes, label: str, panel: pd.DataFrame) -> None:
    """Draw one quantity of every contender over the GPU counts, with names at the curves' ends."""
    ends: list[tuple[float, float, str, str]] = []
    for contender in style.ordered(panel["contender"]):
        mine = panel[panel["contender"] == contender].sort_values("num_gpus")
        gpus, per_gpu, tflops = (
            mine[c].to_numpy(float)
            for c in ("num_gpus", "tokens_per_s_per_gpu", "model_tflops_per_gpu")
        )
        values = {
            "tokens/s": gpus * per_gpu,
            "model PFLOP/s": gpus * tflops / 1000,
            "efficiency [%]": 100 * per_gpu / per_gpu[0],
        }[label]
        bounds = intervals(mine, "tokens_per_s_per_gpu") if label == "tokens/s" else None
        scaled = None if bounds is None else gpus * bounds
        axis.errorbar(gpus, values, scaled, capsize=2, **style.line(contender))
        ends.append(
            (gpus[-1], values[-1], words.contender_label(contender), style.colour(contender))
        )
    if label.startswith("efficiency"):
        axis.axhline(100, color=style.NEUTRAL, linewidth=0.8)
        axis.margins(y=0.08)
    axis.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    _gpu_axis(axis, sorted(panel["num_gpus"].unique()))
    style.label_ends(axis, ends)


def _gpu_axis(axis: Axes, counts: list[int]) -> None:
    axis.set_xscale("log", base=2)
    axis.set_xticks(counts, [str(count) for count in counts])
    axis.minorticks_off()
    axis.set_ylim(bottom=0)
