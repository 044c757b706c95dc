"""Weight gradients put off: linear layers whose backward gives dX now and dW later.

``nn.Linear`` modules are given a class of their own, one by one, so model code stays as it is.
Backward keeps (x, dY), exactly what dW = dYᵀx needs; the parameters are not needed then,
so a chunk may be released between its input gradients and its weight gradients. Norms, embeddings
and biases are cheap and take their gradients at once.

Under torch.compile a graph ends before every such layer and begins behind it: what a compiled
backward is given may be overwritten when that ends, so (x, dY) must not come from inside one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class WeightGradStore:
    """Holds what linear layers put off, for one microbatch at a time.

    Between ``begin`` and ``end`` layers put off their weight gradients; at any other time they
    compute them at once.
    """

    def __init__(self) -> None:
        self._pending: dict[int, deque[Callable[[], None]]] = {}
        self._current: deque[Callable[[], None]] | None = None

    def begin(self, microbatch: int) -> None:
        """From here on put off, for this microbatch."""
        self._current = self._pending.setdefault(microbatch, deque())

    def end(self) -> None:
        """Stop putting off."""
        self._current = None

    def put(self, work: Callable[[], None]) -> None:
        """Take one layer's work, or do it at once."""
        if self._current is None:
            work()
        else:
            self._current.append(work)

    def run(self, microbatch: int) -> None:
        """Do all that was put off for a microbatch, freeing its tensors as it goes."""
        pending = self._pending.pop(microbatch)
        while pending:
            pending.popleft()()


class _DeferredLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, store: WeightGradStore
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.store = store
        # The parameter object takes the gradient later; a saved tensor would be another object.
        ctx.parameter = weight
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        parameter = ctx.parameter
        grad_rows = grad.flatten(0, -2)
        x_rows = x.flatten(0, -2)
        if ctx.needs_input_grad[1]:
            ctx.store.put(lambda: _accumulate(parameter, grad_rows, x_rows))
        grad_x = grad @ weight if ctx.needs_input_grad[0] else None
        grad_bias = grad_rows.sum(0) if ctx.needs_input_grad[2] else None
        return grad_x, None, grad_bias, None


def _accumulate(parameter: Tensor, grad_rows: Tensor, x_rows: Tensor) -> None:
    with torch.no_grad():
        if parameter.grad is None:
            parameter.grad = grad_rows.t() @ x_rows
        else:
            parameter.grad.addmm_(grad_rows.t(), x_rows)


class DeferredLinear(nn.Linear):
    """A linear layer that gives its weight gradient to ``store``."""

    store: WeightGradStore

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, x: Tensor) -> Tensor:
        """As ``nn.Linear``."""
        return _DeferredLinear.apply(x, self.weight, self.bias, self.store)  # type: ignore[no-any-return, no-untyped-call]


def defer_weight_grads(modules: Iterable[nn.Module], store: WeightGradStore) -> None:
    """Teach every plain ``nn.Linear`` below the modules to use the store.

    A linear layer whose output is no hidden state (a head with its wide logits) should not be
    given here: what it would keep is larger than what its chunk keeps.
    """
    for root in modules:
        for module in root.modules():
            if type(module) is nn.Linear:
                module.__class__ = DeferredLinear
                setattr(module, "store", store)  # noqa: B010
