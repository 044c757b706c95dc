"""ZeroPP's entry in the registry of contenders."""

from __future__ import annotations

from operator import attrgetter

from zeropp.contender.knobs import ZeroppKnobs
from zeropp.contender.plan import order, order_drafts, size
from zeropp.contender.space import SPACE
from zeropp.tune.contender import Contender, Style

ZEROPP = Contender(
    name="zeropp",
    label="ZeroPP",
    style=Style(colour="#0072B2", hatch="", dashes="-", marker="o"),
    knobs=ZeroppKnobs,
    size=size,
    order=order,
    drafts=order_drafts,
    space=SPACE,
    left_open=attrgetter("is_open"),
    search_effort=4,
    caveat=(
        "No measurement of PP x ZeRO-3 with gathers per unit (ZeroPP) has been published: its "
        "simulated step is the sum of parts (kernels, pipeline, gathers) that are held against "
        "measurements."
    ),
    reproduces_dropout=True,
    trainer="zeropp.contender.trainer:build",
)
