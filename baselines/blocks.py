"""Recomputation and ``torch.compile`` of a transformer block, as the plan says, for every contender
whose layers are those of ``baselines.model``."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from zeropp.engine.layers.chunk import run_recomputed
from zeropp.schedule.plan import Plan


def prepare_block(block: nn.Module, plan: Plan, *, recomputed: bool) -> None:
    """Wrap a transformer block's ``forward`` for recomputation (``recomputed``) and compilation (as
    the plan says). It is called before ``fully_shard``, so that FSDP2's hooks stay outside."""
    if recomputed:
        block.forward = partial(
            run_recomputed, block.forward, recompute=plan.recompute, random=plan.shape.dropout > 0
        )
    if plan.compile:
        block.forward = torch.compile(block.forward)
