"""How every figure looks: one colour a contender everywhere, readable in print and without colour.

Colours are Okabe and Ito's, made for the colour-blind; hatches repeat the distinction for print.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import matplotlib

COLOURS = {
    "ZeroPP": "#0072B2",
    "DeepSpeed 3D": "#D55E00",
    "torch PP": "#009E73",
    "FSDP2": "#CC79A7",
    "3D, best known": "#E69F00",
}
HATCHES = {"ZeroPP": "", "DeepSpeed 3D": "//", "torch PP": "..", "FSDP2": "xx"}
_OTHER = "#56B4E9"

_RC: Any = {
    "figure.dpi": 110,
    "savefig.dpi": 200,
    "savefig.bbox": "tight",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "svg.hashsalt": "zeropp",
}


def applied() -> AbstractContextManager[None]:
    """A context in which figures are drawn in this style."""
    return matplotlib.rc_context(_RC)


def colour(contender: str) -> str:
    """The contender's colour."""
    return COLOURS.get(contender, _OTHER)


def hatch(contender: str) -> str:
    """The contender's hatch."""
    return HATCHES.get(contender, "\\\\")
