"""Update and clipping as every contender, and the one process that they are held to, have them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from zeropp.types.training import OptimizerConfig


def build_optimizer(
    parameters: Iterable[nn.Parameter], config: OptimizerConfig
) -> torch.optim.Optimizer:
    """AdamW with decoupled weight decay (arXiv 1711.05101), or plain SGD without momentum.

    AdamW is fused for every contender. By default torch would update DTensors one by one, but plain
    tensors together, which would favour the contenders that have plain tensors.
    """
    if config.kind == "sgd":
        return torch.optim.SGD(parameters, lr=config.lr, weight_decay=config.weight_decay)
    return torch.optim.AdamW(
        parameters,
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=True,
    )


def clip_factor(norm: Tensor, clip_norm: float) -> Tensor:
    """The factor by which clipping scales all gradients, given their global norm, on the device. As
    in torch's ``clip_grad_norm_`` it is ``clip_norm / (norm + 1e-6)`` but at most 1, and NaN if the
    norm is NaN."""
    return (clip_norm / (norm + 1e-6)).clamp(max=1.0)


def square_norm(parts: Iterable[tuple[Tensor, float]], device: torch.device) -> Tensor:
    """This rank's part of the squared gradient norm in fp64; the parts of all ranks add up to it.
    ``parts`` as in ``power_of_norm``."""
    return power_of_norm(parts, device, 2.0)


def power_of_norm(
    parts: Iterable[tuple[Tensor, float]], device: torch.device, norm_type: float
) -> Tensor:
    """This rank's part of the p-th power of the gradient's p-norm in fp64; the parts of all ranks
    add up to it. For a norm of infinity it is this rank's norm, and the largest is that of all.

    ``parts``: (local gradient, number of ranks that hold the same).
    Torch's ``get_total_norm`` uses one kernel for many gradients, since one launch per tensor would
    cost a contender with many small tensors more than one with few large tensors. Gradients of 16
    bits are summed in fp32, one by one.
    """
    alike: defaultdict[tuple[float, torch.dtype], list[Tensor]] = defaultdict(list)
    for gradient, copies in parts:
        alike[copies, gradient.dtype].append(gradient)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for (copies, dtype), gradients in alike.items():
        if torch.finfo(dtype).bits < 32:
            kind = {"ord": norm_type, "dtype": torch.float32}
            gradients = [torch.linalg.vector_norm(g, **kind) for g in gradients]
        norm = get_total_norm(gradients, norm_type).double()
        total = total.maximum(norm) if norm_type == math.inf else total + norm**norm_type / copies
    return total


def is_of_elements(value: Any, tensor: Tensor) -> bool:
    """Whether what an optimizer keeps of a tensor is one number per element of it."""
    return isinstance(value, Tensor) and value.shape == tensor.shape
