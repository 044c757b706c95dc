"""Weight gradients put off: linear layers whose backward gives dX now and dW later.

``nn.Linear`` modules, subclasses of it that compute as it does, and the ``Conv1D`` of Hugging
Face's GPT-2 are given a class of their own, one by one, so model code stays as it is. Backward
keeps (x, dY), exactly what dW = dYᵀx needs; the parameters are not needed then, so a chunk may be
released between its input gradients and its weight gradients. Norms, embeddings and biases are
cheap and take their gradients at once. So do weights with hooks of the user's, which autograd
calls, and what runs outside of a chunk's backward: a layer that asks for gradients in its own
forward.

Under torch.compile a graph ends before every such layer and begins behind it: what a compiled
backward is given may be overwritten when that ends, so (x, dY) must not come from inside one.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zeropp.engine.uses import Uses

_running = False  # a chunk's backward is under way


@contextmanager
def backward_of_chunk() -> Iterator[None]:
    """Inside this context linear layers may add their weight gradients themselves."""
    global _running
    _running = True
    try:
        yield
    finally:
        _running = False


class WeightGradStore:
    """Holds what linear layers put off, for one microbatch at a time.

    Between ``begin`` and ``end`` layers put off their weight gradients; at any other time they
    compute them at once. ``uses`` is told of the weights that have had gradients.
    """

    def __init__(self, uses: Uses | None = None) -> None:
        self.uses = Uses() if uses is None else uses
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

    def takes(self) -> bool:
        """Whether a backward runs whose weight gradients are added here, now or later."""
        return _running or self._current is not None

    def run(self, microbatch: int) -> None:
        """Do all that was put off for a microbatch, freeing its tensors as it goes."""
        pending = self._pending.pop(microbatch, deque())  # a frozen chunk has put off nothing
        while pending:
            pending.popleft()()


class _DeferredLinear(torch.autograd.Function):
    """A linear layer on rows, [rows, in] to [rows, out]; ``transposed`` says that the weight is
    [in, out]. Its output is no view, so that what comes behind may work in place."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        store: WeightGradStore,
        transposed: bool,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.store, ctx.transposed = store, transposed
        ctx.again = store.takes()  # a recomputation, whose nodes only inner backwards run
        # The parameter object takes the gradient later; a saved tensor would be another object.
        ctx.parameter = weight
        return F.linear(x, weight.t() if transposed else weight, bias)

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        left, right = (x, grad) if ctx.transposed else (grad, x)
        grad_weight = None
        inner = ctx.again or not ctx.store.takes() or torch.is_grad_enabled()
        if ctx.needs_input_grad[1] and not inner:
            parameter = ctx.parameter
            ctx.store.uses.add(parameter)
            ctx.store.put(lambda: accumulate(parameter, left, right))
        elif ctx.needs_input_grad[1]:
            grad_weight = left.t() @ right
        back = weight.t() if ctx.transposed else weight
        # Autocast computes in a smaller type than the weight's.
        grad_x = grad @ back.to(grad.dtype) if ctx.needs_input_grad[0] else None
        grad_bias = grad.sum(0) if ctx.needs_input_grad[2] else None
        return grad_x, grad_weight, grad_bias, None, None


@torch.no_grad()
def accumulate(parameter: Tensor, left: Tensor, right: Tensor) -> None:
    """Add ``leftᵀ right`` to a parameter's gradient inside the product: one kernel, fp32 sums.

    ``left`` is [rows, first dimension] and ``right`` [rows, second dimension] of the gradient; both
    may be of a smaller type than it is.
    """
    if parameter.grad is None:
        parameter.grad = (left.t() @ right).to(parameter.dtype)
    elif parameter.grad.dtype == left.dtype == right.dtype:
        parameter.grad.addmm_(left.t(), right)
    else:
        add_wide_product(parameter.grad, left.t(), right)


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
        return _on_rows(x, weight, self.bias, self.store, transposed=False)


class DeferredConv1D(nn.Module):
    """Hugging Face's ``Conv1D``: a linear layer whose weight is [in, out]."""

    store: WeightGradStore
    weight: nn.Parameter
    bias: nn.Parameter

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, x: Tensor) -> Tensor:
        """As ``transformers.pytorch_utils.Conv1D``."""
        return _on_rows(x, self.weight, self.bias, self.store, transposed=True)


def _on_rows(
    x: Tensor, weight: Tensor, bias: Tensor | None, store: WeightGradStore, *, transposed: bool
) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
        rows = rows.to(torch.get_autocast_dtype(x.device.type))  # as F.linear reads it
    output = _DeferredLinear.apply(rows, weight, bias, store, transposed)  # type: ignore[no-untyped-call]
    return output.view(*x.shape[:-1], output.shape[-1])  # type: ignore[no-any-return]


def defer_weight_grads(
    modules: Iterable[nn.Module], store: WeightGradStore, *, warn: bool = False
) -> list[nn.Parameter]:
    """Teach every linear layer below the modules to use the store; gives their weights.

    A linear layer whose output is no hidden state (a head with its wide logits) should be given a
    store that is never open: what it would keep is larger than what its chunk keeps. ``warn``: say
    once of each class of linear layers that it cannot be taught, because its forward is its own.
    """
    weights = []
    for root in modules:
        for module in root.modules():
            own: Any = type(module)  # hashable, which mypy does not see
            kind = _taught(own)
            if kind is not None and _has_hooked_weight(module):
                continue  # autograd calls the hook
            if kind is not None:
                module.__class__ = kind
                setattr(module, "store", store)  # noqa: B010
                if isinstance(module.weight, nn.Parameter):
                    weights.append(module.weight)
            elif warn and isinstance(module, nn.Linear) and not _computes_weight(own):
                _warn_once(own)
    return weights


def _has_hooked_weight(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return (
        isinstance(weight, nn.Parameter)
        and weight.requires_grad
        and has_hooks(weight.register_hook)
    )


def has_hooks(register: Callable[[Callable[..., None]], Any]) -> bool:
    """Whether there are hooks of the kind that this method of a tensor registers."""
    handle = register(lambda _: None)
    count = len(handle.hooks_dict_ref())
    handle.remove()
    return count > 1


@cache
def _taught(own: type[Any]) -> type[Any] | None:
    """The class that a module of this class is given; None where its weight gradients cannot be
    put off."""
    if issubclass(own, DeferredLinear | DeferredConv1D):
        return own
    if own is nn.Linear:
        return DeferredLinear
    if _computes_weight(own):
        return None
    if issubclass(own, nn.Linear) and own.forward is nn.Linear.forward:
        return type(own.__name__, (DeferredLinear, own), {})
    if (own.__module__, own.__name__) == ("transformers.pytorch_utils", "Conv1D"):
        return type(own.__name__, (DeferredConv1D, own), {})
    return None


def _computes_weight(own: type[nn.Module]) -> bool:
    """Whether a class of modules makes its weight out of other parameters (torch's parametrize),
    which take the gradient."""
    return isinstance(getattr(own, "weight", None), property)


@cache
def _warn_once(own: type[Any]) -> None:
    warnings.warn(
        f"{own.__module__}.{own.__qualname__}: its forward is not that of nn.Linear, so its weight "
        "gradients are computed at once and cannot fill bubbles of the pipeline",
        stacklevel=2,
    )
