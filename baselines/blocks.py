"""Recomputation and ``torch.compile`` of a transformer block, as the plan says, for every contender
whose layers are those of ``baselines.model``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from zeropp.engine.layers.chunk import run_recomputed
from zeropp.engine.layers.eight_bits import to_8_bits
from zeropp.schedule.plan import Plan


def prepare_block(
    block: nn.Module,
    plan: Plan,
    device: torch.device,
    *,
    recomputed: bool,
    kept: Callable[[Any], None] | None = None,
) -> None:
    """Convert a transformer block to 8 bits, and wrap its ``forward`` for recomputation
    (``recomputed``) and compilation, as the plan says. It is called before ``fully_shard``, so that
    FSDP2's hooks stay outside, and the weights of 8-bit products are gathered in 8 bits. ``kept``
    as in ``run_recomputed``."""
    if plan.precision == "fp8":
        to_8_bits(block, device, gathers_casts=True)
    if recomputed:
        block.forward = partial(
            run_recomputed,
            block.forward,
            recompute=plan.recompute,
            random=plan.shape.dropout > 0,
            kept=kept,
        )
    if plan.compile:
        block.forward = torch.compile(block.forward)
