"""DeepSpeed 3D's entry in the registry of contenders."""

from __future__ import annotations

from baselines.deepspeed_3d.knobs import DeepSpeedKnobs
from baselines.deepspeed_3d.plan import order, size
from baselines.deepspeed_3d.space import SPACE
from zeropp.tune.contender import Contender, Style

DEEPSPEED_3D = Contender(
    name="deepspeed_3d",
    label="DeepSpeed 3D",
    style=Style(colour="#D55E00", hatch="//", dashes=(0, (5, 2)), marker="s"),
    knobs=DeepSpeedKnobs,
    size=size,
    order=order,
    space=SPACE,
    trainer="baselines.deepspeed_3d.trainer:build",
    late_imports=(  # by deepspeed.initialize: two seconds of work per rank
        "deepspeed.runtime.zero.muon.muon_optimizer",
        "deepspeed.comm.mori",
        "deepspeed.module_inject.auto_ep_layer",
        "distutils.ccompiler",
    ),
    takes_fake_tensors=False,  # docs/simulator.md says why
    filler="baselines.deepspeed_3d.messages:fill",
)
