"""What each contender's step time is spent on: the compute limit, and above it the losses by cause.

There is one stacked bar per contender, in multiples of the step at the compute limit, so that a
contender at the limit would end at 1. The causes are those of ``zeropp.sim.lost_time``, which add
up to the step exactly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from benchmarks.report import style
from benchmarks.report.picture import Picture

# Paul Tol's "muted" and similar colours, with hatches, unlike the colours of contenders.
_LOOKS = {
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


@dataclass(frozen=True)
class Cell:
    """One comparison: per contender, the seconds of its step by cause."""

    title: str
    losses_s: Mapping[str, Mapping[str, float]]


def loss_split(cells: Sequence[Cell], name: str, caption: str) -> Picture:
    """One panel per cell that has a contender, with one stacked bar per contender, the fastest
    first. Raises ValueError if no cell has any."""
    cells = [cell for cell in cells if cell.losses_s]
    if not cells:
        raise ValueError("loss_split: no cell has a contender")
    lines = [len(cell.losses_s) + 1.0 for cell in cells]
    height = 0.4 + 0.36 * sum(lines) / len(lines)
    figure, axes = style.panels(len(cells), columns=1, width=9.0, height=height, heights=lines)
    for axis, cell in zip(axes, cells, strict=True):
        _bars(axis, cell)
    axes[-1].set_xlabel("step, in multiples of the compute limit's (dashed)")
    style.legend(figure, axes)
    return Picture(
        section="Compute limit", name=name, caption=caption, figure=figure, shown=caption
    )


def _bars(axis: Axes, cell: Cell) -> None:
    steps = {name: sum(kinds.values()) / kinds["limit"] for name, kinds in cell.losses_s.items()}
    contenders = sorted(steps, key=steps.__getitem__)
    places = np.arange(len(contenders))
    right, left = np.zeros(len(contenders)), np.zeros(len(contenders))
    for kind, (label, colour, hatch) in _LOOKS.items():
        losses = [cell.losses_s[name] for name in contenders]
        sizes = np.array([kinds.get(kind, 0.0) / kinds["limit"] for kinds in losses])
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
    axis.set_title(cell.title)
