"""The optimizer of every contender and of the reference: torch's own, with one arithmetic."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

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
