"""The optimizer of every contender and of the reference: torch's own, with one arithmetic."""

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

    On CUDA AdamW is fused for every contender: left to itself torch would loop over DTensors one
    by one and not over plain tensors, which would favour whoever has plain ones.
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


def square_norm(parts: Iterable[tuple[Tensor, float]], device: torch.device) -> Tensor:
    """This rank's share of the squared gradient norm, fp64: summed over all ranks it is the whole.

    ``parts``: (local gradient, number of ranks that hold the same). All contenders take it this
    way: torch's ``get_total_norm`` reads many gradients in one kernel, where a kernel for each
    would slow down whoever has many. Gradients of 16 bits are summed in fp32, one by one.
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
