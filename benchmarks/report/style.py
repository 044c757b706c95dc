"""How every figure looks: a contender has the same style everywhere.

Functions take a contender's key; legends show its label (``display``). The colours are Okabe and
Ito's, which colour-blind readers can tell apart; hatches, dashes and markers repeat the distinction
for print without colour.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import matplotlib
import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from benchmarks.report import display
from benchmarks.specification.contenders import PRICED

matplotlib.use("Agg")


class Style(NamedTuple):
    """How figures draw a contender."""

    colour: str
    hatch: str
    dashes: str | tuple[float, tuple[float, ...]]  # as matplotlib takes them
    marker: str


_STYLES = {
    "zeropp": Style("#0072B2", "", "-", "o"),
    "deepspeed_3d": Style("#D55E00", "//", (0, (5, 2)), "s"),
    "deepspeed": Style("#999933", "\\\\//", (0, (2, 1)), "X"),
    "torch_pp": Style("#009E73", "..", (0, (1, 1.2)), "^"),
    "torchtitan": Style("#882255", "oo", (0, (6, 1)), "h"),
    "fsdp": Style("#CC79A7", "xx", "-.", "D"),
    "megatron_fsdp": Style("#117733", "**", (0, (5, 1)), "d"),
    "megatron_core": Style("#56B4E9", "++", (0, (3, 1)), "P"),
    "megatron_core_local": Style("#332288", "OO", (0, (1, 1)), "p"),
    "best_3d": Style("#E69F00", "\\\\", "-", "v"),
    "deepspeed_best": Style("#661100", "//..", (0, (8, 1)), ">"),
    "deepspeed_zero3": Style("#AA4499", "||", (0, (4, 1, 1, 1)), "<"),
}
_OTHER = Style("#44AA99", "-.", (0, (2, 2)), "H")  # contenders without an entry
COLUMNS = 3  # panels side by side
WARM, COOL, NEUTRAL = "#D55E00", "#0072B2", "#777777"  # worse, better, neither

_RC: Any = {
    "figure.dpi": 110,
    "savefig.dpi": 150,
    "font.size": 10,
    "text.hinting": "no_hinting",  # which would take a tenth of a figure's time
    "axes.titlesize": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "hatch.linewidth": 0.8,
    "svg.hashsalt": "zeropp",
    "pdf.fonttype": 42,  # publishers refuse Type 3
    "figure.max_open_warning": 0,
}
plt.rcParams.update(_RC)


def colour(contender: str) -> str:
    """The contender's colour."""
    return _STYLES.get(contender, _OTHER).colour


def hatch(contender: str) -> str:
    """The contender's hatch."""
    return _STYLES.get(contender, _OTHER).hatch


def line(contender: str) -> dict[str, Any]:
    """Colour, dashes and marker of the contender's line."""
    style = _STYLES.get(contender, _OTHER)
    return {"color": style.colour, "linestyle": style.dashes, "marker": style.marker}


def ordered(contenders: Iterable[str]) -> list[str]:
    """The contenders without repetition, in the registry's order, which is that of all figures."""
    rank = {name: number for number, name in enumerate(PRICED)}
    return sorted(set(contenders), key=lambda name: (rank.get(name, len(rank)), name))


def panels(
    count: int,
    columns: int = COLUMNS,
    *,
    width: float = 4.0,
    height: float = 3.1,
    heights: Sequence[float] | None = None,
) -> tuple[Figure, list[Axes]]:
    """A figure of ``count`` panels, ``columns`` of them side by side.

    ``width`` and ``height`` are inches per panel. ``heights`` gives the rows of panels heights in
    that proportion; ``height`` is then their mean.
    """
    columns = min(columns, count)
    lines = -(-count // columns)
    figure, axes = plt.subplots(
        lines,
        columns,
        figsize=(width * columns, height * lines + 0.4),
        squeeze=False,
        layout="constrained",
        height_ratios=heights,
    )
    flat: list[Axes] = list(axes.flat)
    for spare in flat[count:]:
        spare.set_visible(False)
    return figure, flat[:count]


def label_ends(axis: Axes, ends: Sequence[tuple[float, float, str, str]]) -> None:
    """Write names at the ends of curves. ``ends``: (x, y, name, colour) of their last points.

    Names that would overlap are moved apart. The y axis must be linear and its limits set.
    """
    low, high = axis.get_ylim()
    gap = 0.075 * (high - low)
    ends = sorted(ends, key=lambda end: (round(8 * end[1] / gap), end[2]))
    places: list[float] = []
    for _, y, _, _ in ends:
        places.append(max(y, places[-1] + gap) if places else y)
    pushed = (sum(places) - sum(y for _, y, _, _ in ends)) / len(ends)
    pushed = min(max(pushed, places[-1] - high), places[0] - low)
    across = axis.get_yaxis_transform()  # x in widths of the panel, y in data
    to_width = axis.transData + axis.transAxes.inverted()
    for (x, y, name, shade), place in zip(ends, places, strict=True):
        height, from_x = place - pushed, to_width.transform((x, y))[0]
        # Not annotate's arrow, which takes many times as long.
        leader = Line2D((from_x, 1.05), (y, height), transform=across, color=shade, linewidth=0.6)
        leader.set_clip_on(False)
        leader.set_in_layout(False)
        axis.add_artist(leader)
        look: dict[str, Any] = {"color": readable(shade), "fontsize": 8.5, "va": "center"}
        axis.text(1.06, height, name, transform=across, **look)


def beside(axis: Axes, x: float, y: float, text: str, points: float = 6) -> None:
    """Write a small text beside (x, y): ``points`` to the right, or to the left if negative."""
    side = "left" if points > 0 else "right"
    axis.annotate(
        text, (x, y), (points, 0), textcoords="offset points", va="center", ha=side, fontsize=8
    )


def readable(shade: str) -> tuple[float, float, float]:
    """A colour in which letters can be read on white: one that is too light (yellow) is darkened
    to a weighted mean of its parts of at most 0.55."""
    red, green, blue = to_rgb(shade)
    light = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    factor = min(1.0, 0.55 / light) if light else 1.0
    return factor * red, factor * green, factor * blue


def shown(rows: pd.DataFrame) -> str:
    """The line below a figure that says what its rows are: kind of evidence, cluster, model, batch,
    and the labels of contenders that nobody has tuned."""
    first = rows.iloc[0]
    basis = str(first.get("basis") or "")
    parts = [", ".join(filter(None, (str(first["evidence"]), basis)))]
    parts.append("on " + ", ".join(display.cluster_label(str(c)) for c in rows["cluster"].unique()))
    parts.append(_few([display.model_label(str(m)) for m in rows["model"].unique()], "models"))
    batches = [str(batch) for batch in sorted(rows["global_batch"].unique())]
    parts.append("batch " + _few(batches, "sizes"))
    for name in display.varied(rows):
        values = [display.value_text(value) for value in rows[name].dropna().unique()]
        parts += [f"{display.setting_label(name)} {_few(values, 'values')}"] if values else []
    if "default_degrees" in rows:
        names = rows[rows["default_degrees"].eq(True)]["contender"]
        labels = [display.contender_label(name) for name in ordered(names)]
        parts += [f"default degrees: {', '.join(labels)}"] if labels else []
    parts += filter(None, [display.unchecked_note(rows)])
    return " · ".join(parts)


def _few(names: list[str], word: str) -> str:
    """The names, or their number if they are too many for a line."""
    return ", ".join(names) if len(names) <= 4 else f"{len(names)} {word}"


def legend(figure: Figure, axes: Sequence[Axes]) -> None:
    """Draw one legend above the panels, for everything that has a label in any of them."""
    marks: dict[str, Any] = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            marks.setdefault(label, handle)
    if marks:
        entry = 0.7 + 0.085 * max(map(len, marks))  # inches of the widest
        columns = max(1, min(6, len(marks), int(figure.get_figwidth() / entry)))
        figure.legend(list(marks.values()), list(marks), loc="outside upper center", ncols=columns)
