"""What the two contenders on FSDP2 (``fsdp`` and ``torch_pp``) share.

It builds the device mesh, wraps modules with ``fully_shard``, counts FSDP2's collectives, and takes
the global gradient norm.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from baselines.private_names import (
    DefaultAllGather,
    DefaultReduceScatter,
    scale_all,
    with_real_tensors,
)
from zeropp.engine.update.update_rules import clip_factor, norm_power
from zeropp.schedule.plan import SizedPlan
from zeropp.types.layout import Layout
from zeropp.types.training import StepResult


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full(tensor: Tensor) -> Tensor:
    """The whole of a DTensor, gathered over its mesh (a collective); any other tensor as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def world_mesh(layout: Layout, device: torch.device) -> DeviceMesh:
    """A device mesh of all ranks, with one named dimension per axis of the layout."""
    names, sizes = zip(*layout.axes, strict=True)
    # ``init_device_mesh`` reads the values of tensors, which a trace's fake tensors do not have.
    with with_real_tensors():
        return init_device_mesh(device.type, sizes, mesh_dim_names=names)


def data_mesh(mesh: DeviceMesh, layout: Layout) -> DeviceMesh:
    """The part of the mesh that FSDP2 uses: 1-D (shard), or 2-D (replicate, shard) where there is
    more than one replica."""
    return mesh["shard"] if layout.replicate == 1 else mesh["replicate", "shard"]


def shard(
    module: nn.Module, mesh: DeviceMesh, plan: SizedPlan, *, reshard_after_forward: bool
) -> FSDPModule:
    """``fully_shard`` with compute in bf16 where that is the plan's precision, and reductions in
    its ``reduce_dtype``."""
    policy = MixedPrecisionPolicy()
    if plan.precision != "fp32":
        sent = {"fp32": torch.float32, "bf16": torch.bfloat16}[plan.reduce_dtype]
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=sent)
    sharded = fully_shard(
        module, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward
    )
    assert isinstance(sharded, FSDPModule)
    return sharded


def take_scales(module: nn.Module, plan: SizedPlan) -> None:
    """Take the scales of all weights that are gathered in 8 bits, in one all-reduce."""
    if plan.precision == "fp8":
        from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

        precompute_float8_dynamic_scale_for_fsdp(module)


def count_collectives(module: FSDPModule, counters: Counter[str]) -> None:
    """Count a module's gathers as ``unshard`` and its reductions as ``reduce_grad``."""
    module.set_custom_all_gather(_CountedAllGather(counters))
    module.set_custom_reduce_scatter(_CountedReduceScatter(counters))


class _CountedAllGather(DefaultAllGather):
    def __init__(self, counters: Counter[str]) -> None:
        self._counters = counters

    def __call__(self, *arguments: Any, **keywords: Any) -> dist.Work | None:
        self._counters["unshard"] += 1
        return super().__call__(*arguments, **keywords)


class _CountedReduceScatter(DefaultReduceScatter):
    def __init__(self, counters: Counter[str]) -> None:
        self._counters = counters

    def __call__(self, *arguments: Any, **keywords: Any) -> dist.Work:
        self._counters["reduce_grad"] += 1
        return super().__call__(*arguments, **keywords)


def finish_step(
    parameters: Iterable[nn.Parameter],
    loss: Tensor,
    *,
    layout: Layout,
    device: torch.device,
    clip_norm: float,
    copy: nn.Parameter | None = None,
) -> StepResult:
    """Take the global loss and gradient norm in one all-reduce of two numbers, then clip.

    ``loss`` is this rank's part: summed over all ranks it is the mean over the global batch.
    ``copy`` is a parameter that the norm leaves out, because it repeats another one (the head's
    copy of tied embeddings). Gradients are scaled in place as ``clip_norm`` asks; 0 means no
    clipping. The norm that is returned is the one before clipping. The host waits for nothing.
    """
    held = [(p, p.grad) for p in parameters if p.grad is not None]
    totals = torch.zeros(2, dtype=torch.float64, device=device)
    totals[0] = loss
    totals[1] = norm_power(
        ((local(g), _copies(g, layout)) for parameter, g in held if parameter is not copy), device
    )
    dist.all_reduce(totals)
    result = StepResult(totals[0], totals[1].sqrt())
    if clip_norm:
        scale_all(
            [local(gradient) for _, gradient in held], clip_factor(result.grad_norm, clip_norm)
        )
    return result


def _copies(gradient: Tensor, layout: Layout) -> float:
    """How many ranks hold the same part of a gradient: the tp x dp ranks of its stage, divided by
    the number of parts into which the gradient is sharded over them."""
    parts = 1
    if isinstance(gradient, DTensor):
        for dim, placement in enumerate(gradient.placements):
            if not placement.is_replicate():  # strided shards, too
                parts *= gradient.device_mesh.size(dim)
    return layout.tp * layout.dp / parts
