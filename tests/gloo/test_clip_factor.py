"""Gradients scaled by ``clip_factor`` are as after torch's ``clip_grad_norm_``, at any norm."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from zeropp.engine.update_rules import clip_factor

GRADIENTS = {
    "large": [3.0, 4.0],
    "small": [0.1, 0.0],
    "as_large_as_allowed": [1.0, 0.0],
    "zero": [0.0, 0.0],
    "infinite": [math.inf, 1.0],
    "not_a_number": [math.nan, 1.0],
}


@pytest.mark.parametrize("limit", [1e-8, 1.0, math.inf])
@pytest.mark.parametrize("gradient", GRADIENTS.values(), ids=GRADIENTS)
def test_gradients_are_clipped_as_torch_does_it(gradient: list[float], limit: float) -> None:
    parameter = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    parameter.grad = torch.tensor(gradient, dtype=torch.float64)
    mine = parameter.grad.clone()
    norm = nn.utils.clip_grad_norm_([parameter], limit)
    torch.testing.assert_close(
        mine.mul_(clip_factor(norm, limit)), parameter.grad, rtol=0, atol=0, equal_nan=True
    )
