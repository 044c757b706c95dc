"""A layer in which one rank fails or is interrupted in the middle of a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Fault = Callable[[], object]  # raises on one rank


class FailingLayer(nn.Module):
    """Calls ``fault`` in its third "forward", its first "backward", or its third forward of an
    "evaluation", as ``where`` says; nowhere if it says anything else. The first two are trials."""

    def __init__(self, linear: nn.Module, where: str, fault: Fault) -> None:
        super().__init__()
        self.linear, self.where, self.fault, self.calls = linear, where, fault, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.where == ("forward" if self.training else "evaluation") and self.calls > 2:
            self.fault()
        y: Tensor = self.linear(x)
        return _Backward.apply(y, self.fault) if self.where == "backward" else y  # type: ignore[no-untyped-call]


class _Backward(torch.autograd.Function):
    """Calls ``fault`` in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fault: Fault) -> Tensor:
        ctx.fault = fault
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.fault()
        return gradient, None
