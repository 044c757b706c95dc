"""Delayed weight gradients: linear layers whose backward computes dX at once and dW later.

The model's code stays as it is: each module of class ``nn.Linear``, of a subclass that keeps its
forward, or of torchao's ``Float8Linear`` gets a class of ours that overrides the forward.
The backward keeps x and dY, which is all that dW = dYᵀx needs. It does not need the weight, so a
chunk's parameters may be released between its input gradients and its weight gradients. Norms,
embeddings and biases are cheap, so their gradients are computed at once. So are those of weights
with hooks of the user's, which autograd must call, and those of a layer that computes gradients in
its own forward, which is outside of the chunk's backward.

Under torch.compile the graph breaks before and after every such layer, because torch may reuse the
memory of the inputs of a compiled backward after it has ended, and x and dY are kept for longer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zeropp.engine.layers.eight_bits import EightBitProducts
from zeropp.engine.parameters.parts import GradientParts

# Elements of a weight. To add a smaller one's gradient inside its product saves less time than
# Python takes for it.
_LEAST_ADDED = 2**19
_SHORT = (torch.bfloat16, torch.float16)
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


@dataclass
class _WeightGrad:
    """The weight gradient of a layer, a sum of products of these ``factors``, as ``accumulate`` has
    them; ``products``: in 8 bits."""

    weight: Tensor
    factors: list[tuple[Tensor, Tensor]]
    products: EightBitProducts | None

    def add(self) -> None:
        """Add it to the weight's gradient, in one product."""
        factors = self.factors[0]
        if len(self.factors) > 1:
            left, right = zip(*self.factors, strict=True)
            factors = torch.cat(left), torch.cat(right)
        accumulate(self.weight, *factors, self.products)


class WeightGradStore:
    """Holds the delayed weight gradients of a chunk's linear layers, by microbatch.

    Between ``begin`` and ``end`` the weight gradients of the layers are delayed; at any other time
    they are computed at once.
    """

    def __init__(self) -> None:
        self._pending: dict[int, deque[_WeightGrad]] = {}
        self._current: deque[_WeightGrad] | None = None
        self.parts: GradientParts | None = None  # those of the chunk's gradients, if it has several

    def begin(self, microbatch: int) -> None:
        """From now on delay weight gradients; those that come belong to ``microbatch``."""
        self._current = self._pending.setdefault(microbatch, deque())

    def end(self) -> None:
        """From now on compute weight gradients at once."""
        self._current = None

    def put(self, gradient: _WeightGrad) -> None:
        """Keep one layer's weight gradient, or add it at once."""
        if self._current is None:
            self._add(gradient)
        else:
            self._current.append(gradient)

    def takes(self) -> bool:
        """Whether a backward runs whose weight gradients are added here, now or later."""
        return _running or self._current is not None

    def merge(self, microbatches: Sequence[int]) -> None:
        """Give the last of these microbatches what the others have delayed, layer by layer, if all
        have run the same layers, none of them in 8 bits, where each has a scale of its own."""
        *others, last = [self._pending.get(j, deque()) for j in microbatches] or [deque()]
        layers = [id(gradient.weight) for gradient in last]
        if any(gradient.products for gradient in last):
            return
        if any([id(gradient.weight) for gradient in other] != layers for other in others):
            return
        for place, gradient in enumerate(last):
            gradient.factors[:0] = [one for other in others for one in other[place].factors]
        for other in others:
            other.clear()

    def run(self, microbatch: int) -> None:
        """Compute the delayed weight gradients of a microbatch; each layer's x and dY are freed."""
        pending = self._pending.pop(microbatch, deque())  # a frozen chunk has none
        with torch.no_grad():
            while pending:
                self._add(pending.popleft())

    def _add(self, gradient: _WeightGrad) -> None:
        if self.parts is None:
            gradient.add()
        else:
            self.parts.add(gradient.weight, gradient.add)


# [rows, out] with a bias, because torch would return a view of these rows, which the next layer
# could not change in place.
class _DeferredLinear(torch.autograd.Function):
    """A linear layer, [..., in] to [..., out] or [rows, out]; ``early``: a stand-in; ``products``:
    those in 8 bits, where it has them."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        store: WeightGradStore,
        early: bool,
        products: EightBitProducts | None,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.store, ctx.products = store, products
        # A forward during a backward is a recomputation. The chunk's backward does not run its
        # node, only a backward that a layer starts inside itself does.
        ctx.again = store.takes()
        if store.parts is not None and not ctx.again:
            store.parts.count(weight)
        # The parameter object takes the gradient later; a saved tensor would be another object.
        ctx.parameter = weight
        if early:
            rows = x.shape[:-1] if bias is None else (x.shape[:-1].numel(),)
            return x.new_empty(()).expand(*rows, len(weight))
        return _product(x, weight, bias, products)

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None]:
        products: EightBitProducts | None = ctx.products
        x, weight = ctx.saved_tensors
        rows, grad = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
        grad_weight = None
        inner = ctx.again or not ctx.store.takes() or torch.is_grad_enabled()
        if ctx.needs_input_grad[1] and not inner:
            ctx.store.put(_WeightGrad(ctx.parameter, [(grad, rows)], products))
        elif ctx.needs_input_grad[1]:
            grad_weight = products.weight_gradient(grad, rows) if products else grad.t() @ rows
        grad_x = None
        if ctx.needs_input_grad[0]:
            weight = weight.to(grad.dtype)  # autocast computes in a smaller type than the weight's
            grad_x = products.input_gradient(grad, weight) if products else grad @ weight
            grad_x = grad_x.view(x.shape)
        grad_bias = grad.sum(0) if ctx.needs_input_grad[2] else None
        return grad_x, grad_weight, grad_bias, None, None, None


# The early node's inputs are saved before the product runs, so that where these are the last ones
# of a recomputed block, torch's checkpoint leaves the product out.
class _Product(torch.autograd.Function):
    """The product of an ``early`` layer; torch's ``checkpoint`` skips a last one."""

    @staticmethod
    def forward(
        ctx: Any,
        node: Tensor,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        products: EightBitProducts | None,
    ) -> Tensor:
        del ctx, node
        return _product(x, weight, bias, products)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        return grad, None, None, None, None


def _product(
    x: Tensor, weight: Tensor, bias: Tensor | None, products: EightBitProducts | None
) -> Tensor:
    if products is None:
        return F.linear(x if bias is None else x.reshape(-1, x.shape[-1]), weight, bias)
    output = products.output(x.reshape(-1, x.shape[-1]), weight)
    return output.view(*x.shape[:-1], -1) if bias is None else output + bias


def accumulate(
    parameter: Tensor, left: Tensor, right: Tensor, products: EightBitProducts | None = None
) -> None:
    """Add ``leftᵀ right`` to a parameter's gradient in one matrix product, without a graph.

    ``left`` is [rows, first dimension of the gradient] and ``right`` is [rows, second dimension].
    Both may have a narrower number type than the gradient, which is summed in its own type. It is
    called where gradients are disabled. ``products``: in 8 bits.
    """
    total = parameter.grad
    if products is not None:
        gradient = products.weight_gradient(left, right)
        parameter.grad = gradient.to(parameter.dtype) if total is None else total.add_(gradient)
        return
    if total is None:
        parameter.grad = (left.t() @ right).to(parameter.dtype)
    elif total.dtype == left.dtype == right.dtype:
        total.addmm_(left.t(), right)
    else:
        add_wide_product(total, left.t(), right)


def add_wide_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """``total += left @ right`` for a total of a wider type than the factors.

    On CUDA one kernel reads 16-bit factors and adds in fp32 (``aten::addmm.dtype_out``; it checks
    its types in ``aten/src/ATen/native/cuda/Blas.cpp``). There is no such kernel for other types
    and for CPUs, where the factors are cast to the total's type first.
    """
    if total.is_cuda and total.dtype == torch.float32 and left.dtype == right.dtype in _SHORT:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(left.to(total.dtype), right.to(total.dtype))


class Deferred(nn.Module):
    """A linear layer whose weight gradients go through ``store``; ``early`` where it is
    recomputed, so that the last one need not be. ``in_8_bits``: so are its products."""

    store: WeightGradStore
    weight: nn.Parameter
    bias: nn.Parameter
    early = False
    in_8_bits = False  # as its class says

    def forward(self, input: Tensor) -> Tensor:
        """The forward of a linear layer: [..., in] to [..., out]."""
        x, weight, bias, early = input, self.weight, self.bias, self.early
        if not (isinstance(weight, nn.Parameter) and weight.is_leaf):
            return F.linear(x, weight, bias)  # it is computed from others
        if torch.compiler.is_compiling():
            return _uncompiled(self, x)  # type: ignore[no-any-return]
        if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
            x = x.to(torch.get_autocast_dtype(x.device.type))  # as F.linear reads it
        products = EightBitProducts(self) if type(self).in_8_bits else None
        try:
            output: Tensor = _DeferredLinear.apply(x, weight, bias, self.store, early, products)  # type: ignore[no-untyped-call]
            if early:
                output = _Product.apply(output, x, weight, bias, products)  # type: ignore[no-untyped-call]
            return output if output.dim() == x.dim() else output.view(*x.shape[:-1], len(weight))
        except RuntimeError as error:
            if "functorch" not in str(error):
                raise
            # torch refuses such a function inside torch.func's transforms. The kind that it accepts
            # there (with ``setup_context``) inspects its signature at every call, which takes long.
            return F.linear(x, weight, bias)


class DeferredLinear(Deferred, nn.Linear):  # type: ignore[misc]
    """A class that has a name, by which such layers can be pickled."""


_uncompiled: Any = torch.compiler.disable(Deferred.forward)  # type: ignore[no-untyped-call]


def defer_weight_grads(
    modules: Iterable[nn.Module], store: WeightGradStore, *, delays: bool = True
) -> list[nn.Parameter]:
    """Make all linear layers inside the modules use the store; returns their weights. Unless it
    ``delays`` gradients, only those in which their addition inside the product saves time: none in
    8 bits, whose casts torch.compile joins with what is before, and no small ones.

    Layers with an output much larger than a hidden state (a head, with its logits) should get a
    store that is never open, because x and dY would take more memory than the rest of the chunk's
    activations.
    """
    weights = []
    for root in modules:
        for module in root.modules():
            kind: Any = type(module)  # hashable, which mypy does not see
            delaying = _delaying(kind)
            if delaying is None or (delaying.in_8_bits and not delays):
                continue  # without a look at its weight, which others may compute then
            weight: Any = module.weight
            is_parameter = isinstance(weight, nn.Parameter)
            if is_parameter and weight.requires_grad and hooks_of(weight.register_hook):
                continue  # autograd calls the hook
            if not delays and weight.numel() < _LEAST_ADDED:
                continue
            module.__class__ = delaying
            setattr(module, "store", store)  # noqa: B010
            weights += [weight] if is_parameter else []
    return weights


def save_early(modules: Iterable[nn.Module]) -> None:
    """Let linear layers inside the modules save what their backward needs before their product."""
    for root in modules:
        for module in root.modules():
            if isinstance(module, Deferred):
                module.early = True


def hooks_of(register: Callable[[Callable[..., None]], Any]) -> Sized:
    """The hooks of the kind that this method of a tensor registers, also those of later."""
    handle = register(lambda _: None)
    hooks: Sized = handle.hooks_dict_ref()
    handle.remove()
    return hooks


@cache
def _delaying(kind: type[Any]) -> type[Any] | None:
    """The class with which a ``kind`` of module delays its weight gradients; None if it cannot."""
    if issubclass(kind, Deferred):
        return kind
    place = kind.__module__, kind.__name__
    if place == ("torchao.float8.float8_linear", "Float8Linear"):
        return type(kind.__name__, (Deferred, kind), {"in_8_bits": True})
    if isinstance(getattr(kind, "weight", None), property):
        return None  # computed from other parameters, as by torch's ``parametrize``
    if issubclass(kind, nn.Linear) and kind.forward is nn.Linear.forward:
        return DeferredLinear if kind is nn.Linear else type(kind.__name__, (Deferred, kind), {})
    return None
