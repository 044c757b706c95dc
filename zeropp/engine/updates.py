"""What one rank updates: the optimizer over its flat tensors, and their gradients."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from itertools import chain

import torch
from torch import Tensor, nn

from zeropp.engine.flat import FlatParameters
from zeropp.engine.options import MakeOptimizer
from zeropp.optimizer import build_optimizer
from zeropp.training import OptimizerConfig

GroupNames = dict[int, str]  # the optimizer group of a tensor, by the tensor's identity


def make_optimizer(
    flats: Iterable[FlatParameters], asked: OptimizerConfig | MakeOptimizer, device: torch.device
) -> tuple[torch.optim.Optimizer, GroupNames]:
    """The optimizer that was asked for, over what this rank updates of the flat buffers, and which
    tensors belong to which group; a group that this rank has nothing of has one empty tensor."""
    groups: defaultdict[str, list[nn.Parameter]] = defaultdict(list)
    for flat in flats:
        for name, owned in flat.owned.items():
            groups[name].append(owned)
    groups.default_factory = lambda: [nn.Parameter(torch.empty(0, device=device))]
    if not groups:  # optimizers refuse to have nothing at all
        groups["all"]
    if isinstance(asked, OptimizerConfig):
        optimizer = build_optimizer(chain.from_iterable(groups.values()), asked)
    else:
        optimizer = asked(groups)
    return optimizer, {id(one): name for name, members in groups.items() for one in members}


def gradients_of(flats: Iterable[FlatParameters]) -> list[Tensor]:
    """What this rank updates of the flats' gradients."""
    gradients = (owned.grad for flat in flats for owned in flat.owned.values())
    return [gradient for gradient in gradients if gradient is not None]
