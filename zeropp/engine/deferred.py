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
        pending = self._pending.pop(microbatch, deque())  # a frozen chunk has put off nothing
        while pending:
            pending.popleft()()


class _DeferredLinear(torch.autograd.Function):
    """A linear layer on rows, [rows, in] to [rows, out]. Its output is no view, so that what comes
    behind may work in place."""

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
        if ctx.needs_input_grad[1]:
            ctx.store.put(lambda: accumulate(parameter, grad, x))
        grad_x = grad @ weight if ctx.needs_input_grad[0] else None
        grad_bias = grad.sum(0) if ctx.needs_input_grad[2] else None
        return grad_x, None, grad_bias, None


@torch.no_grad()
def accumulate(parameter: Tensor, grad: Tensor, x: Tensor) -> None:
    """Add dW = dYᵀx to a parameter's gradient inside the product: one kernel, fp32 sums.

    ``grad`` [rows, out] and ``x`` [rows, in] may be of a smaller type than the gradient [out, in].
    """
    if parameter.grad is None:
        parameter.grad = grad.t() @ x
    elif parameter.grad.dtype == x.dtype == grad.dtype:
        parameter.grad.addmm_(grad.t(), x)
    else:
        add_wide_product(parameter.grad, grad.t(), x)


def add_wide_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """``total += left @ right`` for a total of a wider type than the factors.

    On CUDA the product reads 16-bit factors as they are (``aten::addmm.dtype_out``); a CPU has no
    such kernel, so there they are made as wide as the total first.
    """
    if total.is_cuda:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(left.to(total.dtype), right.to(total.dtype))


class DeferredLinear(nn.Linear):
    """A linear layer that gives its weight gradient to ``store``."""

    store: WeightGradStore

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, x: Tensor) -> Tensor:
        """As ``nn.Linear``."""
        weight = self.weight
        if not (isinstance(weight, nn.Parameter) and weight.is_leaf):
            return F.linear(x, weight, self.bias)  # computed from others, which take the gradient
        rows = x.reshape(-1, x.shape[-1])
        output = _DeferredLinear.apply(rows, weight, self.bias, self.store)  # type: ignore[no-untyped-call]
        return output.view(*x.shape[:-1], weight.shape[0])  # type: ignore[no-any-return]


def defer_weight_grads(modules: Iterable[nn.Module], store: WeightGradStore) -> list[nn.Parameter]:
    """Teach every plain ``nn.Linear`` below the modules to use the store; gives their weights.

    A linear layer whose output is no hidden state (a head with its wide logits) should be given a
    store that is never open: what it would keep is larger than what its chunk keeps.
    """
    weights = []
    for root in modules:
        for module in root.modules():
            if type(module) is nn.Linear:
                module.__class__ = DeferredLinear
                setattr(module, "store", store)  # noqa: B010
                if isinstance(module.weight, nn.Parameter):
                    weights.append(module.weight)
    return weights
