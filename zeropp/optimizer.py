"""The optimizer that every contender and the one-process reference use: torch's own."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from zeropp.training import OptimizerConfig


def build_optimizer(
    parameters: Iterable[nn.Parameter], config: OptimizerConfig
) -> torch.optim.Optimizer:
    """AdamW with decoupled weight decay (arXiv 1711.05101), or plain SGD without momentum.

    On CUDA, AdamW is fused for every contender. By default torch would update DTensors one by one,
    but plain tensors together, which would favour the contenders that have plain tensors.
    """
    parameters = list(parameters)
    if config.kind == "sgd":
        return torch.optim.SGD(parameters, lr=config.lr, weight_decay=config.weight_decay)
    return torch.optim.AdamW(
        parameters,
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=all(parameter.is_cuda for parameter in parameters) or None,
    )


def clip_factor(norm: float, clip_norm: float) -> float:
    """The factor by which clipping scales all gradients, given their global norm; all contenders
    call this. As in torch's ``clip_grad_norm_`` it is ``clip_norm / (norm + 1e-6)`` but at most 1,
    and NaN if the norm is NaN. If ``clip_norm`` is 0, which means no clipping, it is 1."""
    factor = clip_norm / (norm + 1e-6)
    return 1.0 if not clip_norm or factor >= 1.0 else factor


def square_norm(parts: Iterable[tuple[Tensor, float]], device: torch.device) -> Tensor:
    """This rank's part of the squared gradient norm in fp64; the parts of all ranks add up to it.

    ``parts``: (local gradient, number of ranks that hold the same). All contenders call this.
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
            gradients = [torch.linalg.vector_norm(g, dtype=torch.float32) for g in gradients]
        total += get_total_norm(gradients).double().square() / copies
    return total
