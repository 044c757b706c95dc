"""The bound "3D, best known": it is priced like a contender and cannot be run."""

from __future__ import annotations

from baselines.best_3d.knobs import Best3DKnobs
from baselines.best_3d.plan import order, size
from baselines.best_3d.space import SPACE
from zeropp.tune.contender import Contender, Style

BEST_3D = Contender(
    name="best_3d",
    label="3D, best known",
    style=Style(colour="#E69F00", hatch="\\\\", dashes="-", marker="v"),
    knobs=Best3DKnobs,
    size=size,
    order=order,
    space=SPACE,
)
