"""Kernels that a GPU would run for the operators of one rank, and what they compute and move.

Where a GPU has another operator than a CPU (RMSNorm, products that add in fp32, what is compiled
into one kernel), that one is noted, and allocates what it would there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial, wraps
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional

from zeropp.emulate.device import Tensors, VirtualDevice, size_of, tensors_in
from zeropp.emulate.log import Kernel
from zeropp.emulate.private_names import MANY_IN_ONE_KERNEL, without_modes
from zeropp.emulate.world import replaced
from zeropp.engine import deferred
from zeropp.types.operators import Attention, Product

_PRODUCTS = {"mm", "bmm", "addmm", "addmm_", "baddbmm", "baddbmm_", "_addmm_activation"}
_CONVOLUTIONS = {"convolution", "convolution_backward"}  # as autograd calls all of them
_OVERWRITE = {"copy_", "fill_", "zero_", "normal_", "uniform_", "random_"}
_LOOKUPS = {"embedding", "index_select", "index", "gather"}  # read as much as they write
_SCATTERS = {"embedding_dense_backward", "index_add_", "index_put_"}
_WRITE_ONLY = {"nll_loss_forward", "nll_loss_backward"}  # or read a number per row
_UNPRICED = {"_scaled_mm", "_grouped_mm", "_scaled_grouped_mm"}  # products that have no price yet
_READ_TWICE = {"native_layer_norm_backward", "_fused_rms_norm_backward"}

_cpu_dropout, _cpu_attention = functional.dropout, functional.scaled_dot_product_attention


def describe(name: str, reads: Tensors, writes: Tensors, arguments: Mapping[str, Any]) -> Kernel:
    """What the kernel of an operator computes and moves. ``writes``: also what it reads and
    changes in place."""
    operator = name.partition("::")[2]
    read, written = sum(map(size_of, reads)), sum(map(size_of, writes))
    in_place = operator.endswith("_") and operator not in _OVERWRITE
    if operator in _UNPRICED:
        raise NotImplementedError(f"{name}: has no price (leave out 8 bits and grouped products)")
    if operator in _CONVOLUTIONS:
        return _convolution(name, arguments.get("grad_output", writes[0]), arguments)
    if operator in _PRODUCTS:
        return _product(name, reads, writes[0], in_place=in_place)
    if "scaled_dot_product" in operator or "flash_attention" in operator:
        return _attention(name, reads, is_causal=bool(arguments.get("is_causal")))
    moved = read + written * (2 if in_place else 1)
    if operator in _LOOKUPS:
        moved = 2 * written
    elif operator in _SCATTERS:  # of rows into a table
        moved = written + 2 * max(map(size_of, reads), default=0)
    elif operator in _WRITE_ONLY:
        moved = written
    elif operator in _READ_TWICE:  # once more for the gradients of scales, as written by hand
        moved += sum(map(size_of, reads[:2]))
    elif operator == "all_gather_copy_in":  # reads shards, and writes them into the buffer
        moved = 2 * sum(map(size_of, tensors_in(arguments["all_gather_inputs"])))
    elif operator.startswith("_fused_adam"):  # gradients are only read
        moved -= sum(map(size_of, tensors_in(arguments["grads"])))
    return Kernel(name, moved)


def _product(name: str, reads: Tensors, result: Tensor, *, in_place: bool) -> Kernel:
    """A matrix product, and what it moves beside its factors and a result in their number type: a
    sum that it reads, and the rest of a wider result."""
    *added, left, right = reads
    element = left.element_size()
    moved = sum(map(size_of, added)) + size_of(result) * in_place
    moved += size_of(result) - result.numel() * element
    (m, k), n = left.shape[-2:], right.shape[-1]
    product = Product(m=m, k=k, n=n, batch=prod(left.shape[:-2]))
    return Kernel(name, moved, product, element)


def _convolution(name: str, output: Tensor, arguments: Mapping[str, Any]) -> Kernel:
    """A convolution as the product of an implicit GEMM, for each group one: the places of its
    output (or of its input, if it is transposed), the elements of a filter, and the filters. The
    gradients of input and filters have as many FLOP each: they are one kernel of twice the depth,
    or of the same depth where one of them is not wanted."""
    weight, groups = arguments["weight"], arguments["groups"]
    side = arguments["input"] if arguments["transposed"] else output
    product = Product(
        m=side.numel() // side.shape[1],
        k=sum(arguments.get("output_mask", (True,))[:2]) * prod(weight.shape[1:]),
        n=weight.shape[0] // groups,
        batch=groups,
    )
    return Kernel(name, 0, product, weight.element_size())


def _attention(name: str, reads: Tensors, *, is_causal: bool) -> Kernel:
    backward = "backward" in name
    query, key = reads[backward : backward + 2]
    attention = Attention(
        heads=prod(query.shape[:-2]),
        queries=query.shape[-2],
        keys=key.shape[-2],
        width=query.shape[-1],
        causal=is_causal,
    )
    return Kernel(name, 0, attention, query.element_size(), backward)


def as_on_cuda(device: VirtualDevice) -> AbstractContextManager[None]:
    """Inside this context, what differs on a GPU runs as there."""

    def add_wide_product(total: Tensor, left: Tensor, right: Tensor) -> None:
        """Add in place without an allocation, like CUDA's kernel; the values do not matter."""
        device.kernel("aten::addmm_", [left, right], [total])

    return replaced(
        (functional, "rms_norm", partial(_rms_norm, device)),
        (functional, "dropout", _dropout),
        (functional, "scaled_dot_product_attention", _drops_inside),
        (deferred, "add_wide_product", add_wide_product),
        (*MANY_IN_ONE_KERNEL, _in_one_kernel),
    )


@contextmanager
def _as_one(
    device: VirtualDevice, name: str, reads: Tensors, writes: list[Tensor]
) -> Iterator[None]:
    """Inside this context no kernel is noted, but one at its end."""
    with device.unseen():
        yield
    device.kernel(name, reads, writes)


def as_one_kernel(device: VirtualDevice, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that a GPU runs as one compiled kernel, and that is not compiled here: a trace
    counts the tensors that it takes and returns, and not the temporaries on the way to them."""

    @wraps(function)
    def run(*arguments: Any, **keywords: Any) -> Any:
        with without_modes():
            result = function(*arguments, **keywords)
        writes = tensors_in(result)
        with _as_one(device, function.__name__, tensors_in([arguments, keywords]), writes):
            for tensor in writes:
                tensor.detach()  # the operator by which a trace sees the tensor's storage
        return result

    return run


class _FusedRmsNorm(torch.autograd.Function):
    """Allocates what CUDA's ``_fused_rms_norm`` does; on CPUs torch computes RMSNorm in parts, and
    keeps each in fp32. The values are zeros, so that an optimizer finds no overflow."""

    @staticmethod
    def forward(ctx: Any, device: VirtualDevice, x: Tensor, weight: Tensor) -> Tensor:
        ctx.device = device
        ctx.save_for_backward(x, weight)
        writes: list[Tensor] = []
        with _as_one(device, "aten::_fused_rms_norm", [x, weight], writes):
            writes.append(torch.zeros_like(x))
        return writes[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        writes: list[Tensor] = []
        with _as_one(ctx.device, "aten::_fused_rms_norm_backward", [grad, x, weight], writes):
            writes += [torch.zeros_like(x), torch.zeros_like(weight)]
        return None, writes[0], writes[1]


def _rms_norm(
    device: VirtualDevice,
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    del eps
    if weight is None:
        weight = input.detach().new_empty(normalized_shape)
    return _FusedRmsNorm.apply(device, input, weight)  # type: ignore[no-any-return, no-untyped-call]


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """One kernel, which also writes a mask of a byte per element; a CPU has three."""
    if not training or not 0 < p < 1 or inplace:
        return _cpu_dropout(input, p, training, inplace)
    dropped: Tensor = torch.ops.aten.native_dropout(input, p, True)[0]
    return dropped


def _drops_inside(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    *arguments: Any,
    **keywords: Any,
) -> Tensor:
    """A GPU's kernel of attention drops scores itself; with dropout a CPU has no such kernel."""
    del dropout_p
    return _cpu_attention(query, key, value, attn_mask, 0.0, *arguments, **keywords)


def _in_one_kernel(tensors: Tensors, device: torch.device) -> bool:
    """Whether a GPU takes the norms of all of these in one kernel, as it does of plain tensors."""
    del device
    return not any(isinstance(tensor, DTensor) for tensor in tensors)
