"""The registry of contenders: where each one's planner and trainer live.

Both are named by module path and imported on first use, so that planning never imports torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from zeropp.plan import Plan, PlanRequest
from zeropp.training import OptimizerConfig, Trainer

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True)
class Contender:
    """One way to train: ``planner``, ``builder`` and ``filler`` are ``module:function``."""

    name: str
    label: str  # in tables and figures
    planner: str
    builder: str
    filler: str = (
        ""  # writes the integers that a lone rank's peers would send, where they are not 1
    )
    # Dropout's masks depend on the step, the microbatch and the piece alone (see
    # zeropp/engine/randomness.py), so that one process can draw them, too.
    reproduces_dropout: bool = False

    def plan(self, request: PlanRequest) -> Plan:
        """The plan for a request; raises InfeasibleError where there is none."""
        return cast("Plan", _load(self.planner)(request))

    def build(
        self, plan: Plan, optimizer: OptimizerConfig, device: torch.device, seed: int
    ) -> Trainer:
        """Build this rank's trainer; collective, after torch.distributed is initialised."""
        return cast("Trainer", _load(self.builder)(plan, optimizer, device, seed))

    def fill_integers(self, plan: Plan, message: Tensor) -> None:
        """Write into a message of integers what a peer would have sent. The usual one is a yes:
        torch's pipeline stages ask their neighbours whether they know the shapes."""
        if self.filler:
            _load(self.filler)(plan, message)
        else:
            message.fill_(1)


def _load(path: str) -> Callable[..., Any]:
    module, _, function = path.partition(":")
    return cast("Callable[..., Any]", getattr(importlib.import_module(module), function))


CONTENDERS: dict[str, Contender] = {
    contender.name: contender
    for contender in (
        Contender(
            "zeropp",
            "ZeroPP",
            "zeropp.planner.zeropp_plan:plan_zeropp",
            "zeropp.engine.trainer:build",
            reproduces_dropout=True,
        ),
        Contender(
            "deepspeed_3d",
            "DeepSpeed 3D",
            "baselines.deepspeed_3d.plan:plan",
            "baselines.deepspeed_3d.trainer:build",
            "baselines.deepspeed_3d.messages:fill",
        ),
        Contender(
            "torch_pp",
            "torch PP",
            "baselines.torch_pp.plan:plan",
            "baselines.torch_pp.trainer:build",
        ),
        Contender("fsdp", "FSDP2", "baselines.fsdp.plan:plan", "baselines.fsdp.trainer:build"),
    )
}
