"""Which of DeepSpeed's engines runs a plan."""

from __future__ import annotations

import torch

from baselines.deepspeed_3d.ordinary import OrdinaryTrainer
from baselines.deepspeed_3d.pipeline import PipelineTrainer
from baselines.deepspeed_3d.private_names import run_on_emulated_device
from baselines.deepspeed_3d.trainer import DeepSpeedTrainer
from zeropp.emulate.kernels import is_emulated
from zeropp.schedule.plan import Plan
from zeropp.types.training import OptimizerConfig


def build(
    plan: Plan, optimizer: OptimizerConfig, device: torch.device, seed: int
) -> DeepSpeedTrainer:
    """Build this rank's part of a plan. All ranks of the world must call it."""
    if is_emulated():
        run_on_emulated_device()
    kind = PipelineTrainer if plan.layout.pp > 1 else OrdinaryTrainer
    return kind(plan, optimizer, device, seed)
