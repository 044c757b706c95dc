"""What each contender's step time is spent on: the compute limit, and above it the losses by cause.

There is one stacked bar per contender, in multiples of the step at the compute limit, so that a
contender at the limit would end at 1. The causes are those of ``zeropp.sim.losses``, which add up
to the step exactly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
    """One panel per cell that has a contender, with one stacked bar per contender. Raises
    ValueError if no cell has any."""
    cells = [cell for cell in cells if cell.losses_s]
    if not cells:
        raise ValueError("loss_split: no cell has a contender")
    figure, axes = style.panels(len(cells), columns=3, width=4.2, height=4.0)
    for axis, cell in zip(axes, cells, strict=True):
        _bars(axis, cell)
    axes[0].set_ylabel("step, in multiples of the compute limit's")
    style.legend(figure, axes)
    return Picture("Compute limit", name, caption, figure)


def _bars(axis: Axes, cell: Cell) -> None:
    contenders = list(cell.losses_s)
    places = np.arange(len(contenders))
    top, below = np.zeros(len(contenders)), np.zeros(len(contenders))
    for kind, (label, colour, hatch) in _LOOKS.items():
        losses = cell.losses_s.values()
        sizes = np.array([kinds.get(kind, 0.0) / kinds["limit"] for kinds in losses])
        bottom = np.where(sizes >= 0, top, below)
        axis.bar(
            places, sizes, 0.75, bottom, label=label, color=colour, hatch=hatch, edgecolor="white"
        )
        top, below = top + np.maximum(sizes, 0), below + np.minimum(sizes, 0)
    for place, height in zip(places, top + below, strict=True):
        text = f"{100 / height:.0f} %\nof limit"
        axis.annotate(text, (place, height), (0, 3), textcoords="offset points", ha="center")
    axis.axhline(1.0, color="black", linewidth=0.8, linestyle="--")
    axis.set_xticks(places, [name.replace(", ", ",\n") for name in contenders], fontsize=8)
    axis.set_ylim(min(0.0, below.min()), 1.15 * top.max())
    axis.set_title(cell.title)
