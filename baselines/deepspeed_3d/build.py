"""Which of DeepSpeed's engines runs a plan."""

from __future__ import annotations

import torch

from baselines.deepspeed_3d.ordinary import OrdinaryTrainer
from baselines.deepspeed_3d.pipeline import PipelineTrainer
from baselines.deepspeed_3d.trainer import DeepSpeedTrainer
from zeropp.schedule.plan import Plan
from zeropp.types.training import OptimizerConfig


def build(
    plan: Plan, optimizer: OptimizerConfig, device: torch.device, seed: int
) -> DeepSpeedTrainer:
    """Build this rank's part of a plan. All ranks of the world must call it."""
    kind = PipelineTrainer if plan.layout.pp > 1 else OrdinaryTrainer
    return kind(plan, optimizer, device, seed)
