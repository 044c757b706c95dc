"""Which optimizer groups are given flat shards of parameters, and which whole parameters.

Flat are those that optimizers of torch update element by element, and all where a caller says that
his do so. All others are whole, as an optimizer may look at a parameter's shape or at its other
elements (Muon, Shampoo, Adafactor). What looks at other parameters, ``zeropp.check`` finds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn, optim

from zeropp.engine.settings import MakeOptimizer
from zeropp.engine.update.update_rules import made_optimizer, parts_of
from zeropp.types.layout import InfeasibleError

_ELEMENTWISE = (
    *(optim.SGD, optim.ASGD, optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax),
    *(optim.Adagrad, optim.Adadelta, optim.RMSprop, optim.Rprop),
)


def groups_whole(
    asked: MakeOptimizer, shapes: Mapping[str, Sequence[tuple[int, ...]]], device: torch.device
) -> tuple[str, ...]:
    """The groups, of parameters of these ``shapes``, that an optimizer is to get whole: it is made
    once of parameters without memory, and takes no step. A group whose parameters it treats in
    different ways (no decay of vectors) is whole, too."""

    def made(where: torch.device) -> tuple[dict[str, list[nn.Parameter]], optim.Optimizer]:
        empty = torch.zeros((), device=where)
        groups = {
            name: [nn.Parameter(empty.expand(shape)) for shape in group]
            for name, group in shapes.items()
        }
        return groups, made_optimizer(asked, groups)

    try:
        groups, optimizer = made(torch.device("meta"))
    except InfeasibleError:  # which says why, here or there
        groups, optimizer = made(device)
    found: dict[int, tuple[bool, str]] = {}
    for place, part in enumerate(parts_of(optimizer)):
        hooks = [one for name, one in vars(part).items() if "hook" in name or name == "step"]
        known = type(part) in _ELEMENTWISE and not any(hooks)
        for group in part.param_groups:
            plain = {key: value for key, value in group.items() if key != "params"}
            found |= {id(one): (known, f"{place} {plain}") for one in group["params"]}
    # What is in no group is refused by name when the optimizer is made of real ones.
    kinds = {name: {found.get(id(x), (True, "")) for x in group} for name, group in groups.items()}
    return tuple(name for name, of in kinds.items() if len(of) > 1 or not all(k for k, _ in of))
