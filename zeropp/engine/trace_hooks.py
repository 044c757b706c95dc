"""Hooks on optimizers, FSDP2 and our engine, by which a trace learns the kinds of its allocations.

While a trace runs, functions of torch and of the engine are wrapped. Some are replaced, because
fake tensors cannot run them, or because their CPU kernel allocates what the CUDA kernel does not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from zeropp.engine import deferred, sums
from zeropp.engine.allocations import Allocations
from zeropp.engine.private_names import (
    FSDP_GATHERED,
    FSDP_GRADIENTS,
    SHAPES_BY_TRIAL,
    FSDPParam,
    unsharded_gradient,
    without_modes,
)


@contextmanager
def observed(allocations: Allocations) -> Iterator[None]:
    """Inside this context, optimizers, FSDP2's gradients and resized storages set their kinds."""
    with ExitStack() as undo:
        for hook, register in (
            (_before_update, register_optimizer_step_pre_hook),
            (_after_update, register_optimizer_step_post_hook),
        ):
            handle = register(lambda o, *_, hook=hook: hook(allocations, o))
            undo.callback(handle.remove)
        for owner, name, wrapper in (
            (DeviceMesh, "__init__", _untraced),
            (*SHAPES_BY_TRIAL, _untraced),
            (functional, "rms_norm", _fused_rms_norm),
            (torch.UntypedStorage, "resize_", _resize),
            (sums, "zeros", _sums),
            (deferred, "add_wide_product", _in_place),
            (*FSDP_GATHERED, _gathered),
            *((owner, name, _gradient) for owner, name in FSDP_GRADIENTS),
        ):
            original = getattr(owner, name)
            undo.callback(setattr, owner, name, original)
            setattr(owner, name, wrapper(original, allocations))
        yield


def _before_update(allocations: Allocations, optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        # As on CUDA, a step without temporaries. Other implementations also read values.
        group.update(fused=True, foreach=False)
        for parameter in group["params"]:
            if parameter.grad is not None:
                allocations.label(parameter.grad, "gradients")
    allocations.kind = "optimizer"


def _after_update(allocations: Allocations, optimizer: torch.optim.Optimizer) -> None:
    del optimizer
    allocations.kind = None


def _untraced(original: Any, allocations: Allocations) -> Any:
    """Run a function outside of the trace, because it needs values: meshes, and shapes that DTensor
    finds by a trial."""
    del allocations

    def run(*arguments: Any, **keywords: Any) -> Any:
        with without_modes():
            return original(*arguments, **keywords)

    return run


class _FusedRmsNorm(torch.autograd.Function):
    """Allocates what CUDA's ``_fused_rms_norm`` does; on CPUs torch computes RMSNorm in parts, and
    keeps each in fp32. The values are zeros, so that an optimizer finds no overflow."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.zeros_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return torch.zeros_like(x), torch.zeros_like(weight)


def _fused_rms_norm(original: Any, allocations: Allocations) -> Any:
    del original, allocations

    def rms_norm(x: Tensor, shape: Any, weight: Tensor, eps: float) -> Tensor:
        del shape, eps
        return _FusedRmsNorm.apply(x, weight)  # type: ignore[no-any-return, no-untyped-call]

    return rms_norm


def _resize(original: Any, allocations: Allocations) -> Any:
    def resize(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        original(storage, size)
        allocations.resize(storage)
        return storage

    return resize


def _sums(original: Any, allocations: Allocations) -> Any:
    def make(*arguments: Any) -> Tensor:
        result: Tensor = original(*arguments)
        allocations.label(result, "gradients")
        return result

    return make


def _in_place(original: Any, allocations: Allocations) -> Any:
    """Add in place without an allocation, like CUDA's kernel; the values do not matter."""
    del original, allocations

    def add(*tensors: Tensor) -> None:
        del tensors

    return add


def _gathered(original: Any, allocations: Allocations) -> Any:
    def allocate(parameter: FSDPParam, *arguments: Any, **keywords: Any) -> None:
        original(parameter, *arguments, **keywords)
        for tensor in parameter.all_gather_outputs:
            allocations.label(tensor, "unsharded")

    return allocate


def _gradient(original: Any, allocations: Allocations) -> Any:
    def accumulate(parameter: FSDPParam) -> None:
        grad = unsharded_gradient(parameter)
        if grad is not None:
            allocations.label(grad, "gradients")
        original(parameter)
        if parameter.unsharded_accumulated_grad is not None:
            allocations.label(parameter.unsharded_accumulated_grad, "gradients")

    return accumulate
