"""Loss curves of contenders that trained on the same batches, and how far the curves differ."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from benchmarks.report import style, words
from benchmarks.report.frame import best_configuration
from benchmarks.report.picture import PANEL, Picture, by_evidence, panel_title

_SAME_BATCHES = [*PANEL, "data_seed"]


def loss_curves(rows: pd.DataFrame) -> Iterator[Picture]:
    """Losses over all steps, warm-up included, where two contenders or topologies trained on the
    same batches from the same initial parameters."""
    best = best_configuration(rows)
    best = best[best["losses"].map(len) > 1]
    for suffix, said, mine in by_evidence(best):
        groups = [panel for _, panel in mine.groupby(_SAME_BATCHES, sort=False) if len(panel) > 1]
        if groups:
            yield Picture(
                section="Loss",
                name=f"loss_{suffix}",
                caption=f"Training loss, {said}: every contender of a panel, at the smallest and "
                "the largest rank count, saw the same batches. Below, the distance from the first "
                "curve of the panel: rounding, if all is well.",
                figure=_curves(groups[: style.COLUMNS]),
                shown=style.shown(pd.concat(groups[: style.COLUMNS])),
            )


def _curves(groups: list[pd.DataFrame]) -> Figure:
    figure, flat = style.panels(2 * len(groups), columns=len(groups), width=4.8)
    top, bottom = flat[: len(groups)], flat[len(groups) :]
    for upper, lower, panel in zip(top, bottom, groups, strict=True):
        extremes = {panel["num_gpus"].min(), panel["num_gpus"].max()}  # more curves would overlap
        panel = panel[panel["num_gpus"].isin(extremes)]
        lines = [row for _, row in panel.sort_values(["num_gpus", "contender"]).iterrows()]
        base = np.asarray(lines[0]["losses"])
        for number, row in enumerate(lines):
            losses = np.asarray(row["losses"])
            look = style.line(row["contender"]) | {"markevery": (number % 4, 4), "markersize": 5}
            look["linewidth"] = 1 + 1.5 * (len(lines) - number) / len(lines)  # the first is widest
            steps = np.arange(1, len(losses) + 1)
            upper.plot(steps, losses, alpha=0.8, **look)
            shared = min(len(base), len(losses))
            error = np.abs(losses[:shared] - base[:shared]) / base[:shared]
            if number:
                lower.plot(steps[:shared], error, **(look | {"markevery": 1, "markersize": 3}))
        upper.set_title(panel_title(panel))
        lower.set_ylim(bottom=0)
        lower.set_xlabel("step")
        for axis in (upper, lower):
            axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        style.label_ends(upper, _ends(lines))
    top[0].set_ylabel("loss [nats/token]")
    bottom[0].set_ylabel("relative distance\nfrom the first curve")
    return figure


def _ends(lines: list[pd.Series]) -> list[tuple[float, float, str, str]]:
    """One name per contender, with its rank counts, at the end of the first of its curves."""
    ends = []
    for contender in style.ordered(row["contender"] for row in lines):
        mine = [row for row in lines if row["contender"] == contender]
        counts = " and ".join(dict.fromkeys(str(row["num_gpus"]) for row in mine))
        losses, name = (
            mine[0]["losses"],
            f"{words.contender_label(contender)}, {counts} ranks",
        )
        ends.append((float(len(losses)), float(losses[-1]), name, style.colour(contender)))
    return ends
