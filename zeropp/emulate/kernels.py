"""Kernels that a GPU would run for the operators of one rank, and what they compute and move.

Where a GPU has another operator than a CPU (RMSNorm, products that add in fp32, what is compiled
into one kernel, the fused optimizer), that one is noted, and allocates what it would there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import wraps
from math import prod
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import functional

from zeropp.emulate.device import Tensors, VirtualDevice, size_of, tensors_in
from zeropp.emulate.log import Kernel
from zeropp.emulate.private_names import (
    CONVERSION,
    MANY_IN_ONE_KERNEL,
    MOST_KNOWN_NUMBERS,
    SHAPES_BY_TRIAL,
    without_modes,
)
from zeropp.engine import deferred, walk
from zeropp.operators import Attention, Product

_device: VirtualDevice | None = None  # that of ``as_on_cuda``

_PRODUCTS = {"mm", "bmm", "addmm", "addmm_", "baddbmm", "baddbmm_", "_addmm_activation"}
_OVERWRITE = {"copy_", "fill_", "zero_", "normal_", "uniform_", "random_"}
_LOOKUPS = {"embedding", "index_select", "index", "gather"}  # read as much as they write
_SCATTERS = {"embedding_dense_backward", "index_add_", "index_put_"}
_WRITE_ONLY = {"nll_loss_forward", "nll_loss_backward"}  # or read a number per row
_READ_TWICE = {"native_layer_norm_backward", "_fused_rms_norm_backward"}


def describe(name: str, reads: Tensors, writes: Tensors, arguments: Mapping[str, Any]) -> Kernel:
    """What the kernel of an operator computes and moves. ``writes``: also what it reads and
    changes in place."""
    operator = name.partition("::")[2]
    read, written = sum(map(size_of, reads)), sum(map(size_of, writes))
    in_place = operator.endswith("_") and operator not in _OVERWRITE
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


@contextmanager
def without_values() -> Iterator[None]:
    """Inside this context, what would need the values of fake tensors runs without them."""
    with ExitStack() as undo:
        for owner, name, stand_in in (
            (DeviceMesh, "__init__", _untraced(DeviceMesh.__init__)),
            (walk, "walk", _untraced(walk.walk)),
            (*SHAPES_BY_TRIAL, _untraced(getattr(*SHAPES_BY_TRIAL))),
            (*CONVERSION, _convert),
            (*MOST_KNOWN_NUMBERS, 256),
        ):
            undo.enter_context(mock.patch.object(owner, name, stand_in))
        yield


@contextmanager
def as_on_cuda(device: VirtualDevice) -> Iterator[None]:
    """Inside this context, what differs on a GPU runs as there."""
    global _device
    with ExitStack() as undo:
        for owner, name, stand_in in (
            (functional, "rms_norm", _rms_norm),
            (deferred, "add_wide_product", _add_wide_product),
            (*MANY_IN_ONE_KERNEL, _in_one_kernel),
            (torch.optim.AdamW, "__init__", _fused(torch.optim.AdamW.__init__)),
            (torch.optim.Adam, "__init__", _fused(torch.optim.Adam.__init__)),
        ):
            undo.enter_context(mock.patch.object(owner, name, stand_in))
        before, _device = _device, device
        try:
            yield
        finally:
            _device = before


def is_emulated() -> bool:
    """Whether what runs is inside ``as_on_cuda``: the CPU stands for a GPU with streams."""
    return _device is not None


@contextmanager
def _as_one(name: str, reads: Tensors, writes: list[Tensor]) -> Iterator[None]:
    """Inside this context no kernel is noted, but one at its end."""
    if _device is None:
        yield
        return
    with _device.unseen():
        yield
    _device.kernel(name, reads, writes)


def _untraced(original: Callable[..., Any]) -> Callable[..., Any]:
    """Run a function outside of the trace, because it needs values: meshes, shapes that DTensor
    finds by a trial, and the walk over layers, which has a trial of its own."""

    @wraps(original)
    def run(*arguments: Any, **keywords: Any) -> Any:
        with without_modes():
            return original(*arguments, **keywords)

    return run


def as_one_kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that a GPU runs as one compiled kernel, and that is not compiled here: a trace
    counts the tensors that it takes and returns, and not the temporaries on the way to them."""

    @wraps(function)
    def run(*arguments: Any, **keywords: Any) -> Any:
        with without_modes():
            result = function(*arguments, **keywords)
        writes = tensors_in(result)
        with _as_one(function.__name__, tensors_in([*arguments, *keywords.values()]), writes):
            for tensor in writes:
                tensor.detach()  # the operator by which a trace sees the tensor's storage
        return result

    return run


class _FusedRmsNorm(torch.autograd.Function):
    """Allocates what CUDA's ``_fused_rms_norm`` does; on CPUs torch computes RMSNorm in parts, and
    keeps each in fp32. The values are zeros, so that an optimizer finds no overflow."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        writes: list[Tensor] = []
        with _as_one("aten::_fused_rms_norm", [x, weight], writes):
            writes.append(torch.zeros_like(x))
        return writes[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        writes: list[Tensor] = []
        with _as_one("aten::_fused_rms_norm_backward", [grad, x, weight], writes):
            writes += [torch.zeros_like(x), torch.zeros_like(weight)]
        return writes[0], writes[1]


def _rms_norm(x: Tensor, shape: Any, weight: Tensor, eps: float) -> Tensor:
    del shape, eps
    return _FusedRmsNorm.apply(x, weight)  # type: ignore[no-any-return, no-untyped-call]


def _add_wide_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add in place without an allocation, like CUDA's kernel; the values do not matter."""
    assert _device is not None
    _device.kernel("aten::addmm_", [left, right], [total])


def _in_one_kernel(tensors: Tensors, device: torch.device) -> bool:
    """Whether a GPU takes the norms of all of these in one kernel, as it does of plain tensors."""
    del device
    return not any(isinstance(tensor, DTensor) for tensor in tensors)


def _convert(module: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
    """Convert the parameters of modules in place, as on a GPU, where torch's own way refuses fake
    ones. What moves to another device, and a DTensor, whose local part would stay as it is, is made
    anew; parameters that modules share stay shared."""
    made: dict[Tensor, nn.Parameter] = {}
    for part in module.modules() if recurse else [module]:
        for name, buffer in [*part.named_buffers(recurse=False)]:
            setattr(part, name, function(buffer))
        for name, old in [*part.named_parameters(recurse=False, remove_duplicate=False)]:
            with torch.no_grad():
                values = old if old in made else function(old)
            if values is old:
                pass
            elif old.device == values.device and not isinstance(old, DTensor):
                old.data = values
            else:
                made[old] = nn.Parameter(values, old.requires_grad)
                vars(made[old]).update(vars(old))
            setattr(part, name, made.get(old, old))
    return module


def _fused(construct: Callable[..., None]) -> Callable[..., None]:
    """As on CUDA, a step without temporaries, and without a number that the host reads."""

    @wraps(construct)
    def fused(*arguments: Any, **keywords: Any) -> None:
        construct(*arguments, **(keywords | {"fused": True, "foreach": None}))

    return fused
