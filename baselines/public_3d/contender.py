"""The entries of the public 3D programs in the registry of contenders; none of them runs here."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from baselines.public_3d.knobs import (
    Best3DKnobs,
    MegatronCoreKnobs,
    MegatronDeepSpeedKnobs,
    Public3D,
    Public3DKnobs,
    ZeroBubbleKnobs,
)
from baselines.public_3d.plan import order, size
from baselines.public_3d.space import SPACE
from zeropp.tune.contender import Contender, Style

P = TypeVar("P", bound=Public3DKnobs)


def _priced(name: Public3D, label: str, style: Style, knobs: type[P]) -> Contender[P]:
    return Contender(
        name=name, label=label, style=style, knobs=knobs, size=size, order=order, space=SPACE
    )


MEGATRON_CORE = _priced(
    "megatron_core",
    "Megatron-Core",
    Style(colour="#56B4E9", hatch="++", dashes=(0, (3, 1)), marker="P"),
    MegatronCoreKnobs,
)
MEGATRON_DEEPSPEED = _priced(
    "megatron_deepspeed",
    "Megatron-DeepSpeed 2022",
    Style(colour="#999999", hatch="--", dashes=(0, (4, 2)), marker="X"),
    MegatronDeepSpeedKnobs,
)
ZERO_BUBBLE = _priced(
    "zero_bubble",
    "zero-bubble fork",
    Style(colour="#F0E442", hatch="xx", dashes=(0, (2, 1)), marker="*"),
    ZeroBubbleKnobs,
)
_BEST_3D = _priced(
    "best_3d",
    "3D, all public parts",
    Style(colour="#E69F00", hatch="\\\\", dashes="-", marker="v"),
    Best3DKnobs,
)
BEST_3D = replace(_BEST_3D, search_effort=2)
