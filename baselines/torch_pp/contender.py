"""The entries of torch's pipelines and of torchtitan in the registry of contenders."""

from __future__ import annotations

from baselines.torch_pp.knobs import TorchPPKnobs, TorchtitanKnobs
from baselines.torch_pp.plan import check, order, size
from baselines.torch_pp.space import SPACE
from zeropp.tune.contender import Contender, Style

TORCH_PP = Contender(
    name="torch_pp",
    label="torch PP",
    style=Style(colour="#009E73", hatch="..", dashes=(0, (1, 1.2)), marker="^"),
    knobs=TorchPPKnobs,
    size=size,
    order=order,
    space=SPACE,
    check=check,
    search_effort=3,
    trainer="baselines.torch_pp.trainer:build",
    unrecorded="gathers and transfers",
)
# torchtitan combines the same schedules, FSDP2 and DTensor. It is priced, but does not run here.
TORCHTITAN = Contender(
    name="torchtitan",
    label="torchtitan",
    style=Style(colour="#882255", hatch="oo", dashes=(0, (6, 1)), marker="h"),
    knobs=TorchtitanKnobs,
    size=size,
    order=order,
    space=SPACE,
    check=check,
    search_effort=1,
)
