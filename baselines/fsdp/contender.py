"""FSDP2's entry in the registry of contenders."""

from __future__ import annotations

from baselines.fsdp.knobs import FSDPKnobs
from baselines.fsdp.plan import order, size
from baselines.fsdp.space import SPACE
from zeropp.tune.contender import Contender, Style

FSDP = Contender(
    name="fsdp",
    label="FSDP2",
    style=Style(colour="#CC79A7", hatch="xx", dashes="-.", marker="D"),
    knobs=FSDPKnobs,
    size=size,
    order=order,
    space=SPACE,
    trainer="baselines.fsdp.trainer:build",
    late_imports=("torch.distributed.fsdp",),
    unrecorded="gathers and reductions",
)
