"""Which optimizer groups are given flat shards of parameters, and which whole parameters.

Flat are those that optimizers of torch update element by element, and all where a caller says that
his do so. All others are whole, as an optimizer may look at a parameter's shape or at its other
elements (Muon, Shampoo, Adafactor). What looks at other parameters, ``zeropp.check`` finds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn, optim

from zeropp.engine.settings import MakeOptimizer
from zeropp.engine.update.update_rules import made_optimizer, parts_of
from zeropp.types.layout import InfeasibleError

_ELEMENTWISE = (
    *(optim.SGD, optim.ASGD, optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax),
    *(optim.Adagrad, optim.Adadelta, optim.RMSprop, optim.Rprop),
)
_KEPT = {optim.SGD: 0, optim.Muon: 0, optim.RMSprop: 1, optim.ASGD: 1, optim.Adagrad: 1}
_MORE = ("momentum", "centered", "amsgrad")  # each of these options keeps one number more
Shapes = Mapping[str, Sequence[tuple[int, ...]]]


class GroupUse(NamedTuple):
    """What an optimizer does with the parameters of a group: whether it gets them ``whole``, and
    how many ``numbers`` it keeps of an element."""

    whole: bool
    numbers: int


def uses_of(asked: MakeOptimizer, shapes: Shapes, device: torch.device) -> dict[str, GroupUse]:
    """What an optimizer does with its groups, of parameters of these ``shapes``. A group whose
    parameters it treats in different ways (no decay of vectors) is whole, too. Numbers are those
    that torch's own keep; any other is taken to keep two, and one more for a momentum. Raises
    InfeasibleError if it goes by places in a group, which are others on every rank."""
    try:
        groups, optimizer = _made_empty(asked, shapes, torch.device("meta"))
    except InfeasibleError:  # which says why, here or there
        groups, optimizer = _made_empty(asked, shapes, device)
    else:
        device = torch.device("meta")
    turned = {name: group[::-1] for name, group in shapes.items()}
    mirrored, other = _made_empty(asked, turned, device)
    found, again, uses = _uses(optimizer), _uses(other), {}
    # What is in no group is refused by name when the optimizer is made of real ones.
    nothing = GroupUse(False, 0), ""
    for name, members in groups.items():
        of_group = [found.get(id(one), nothing) for one in members]
        if of_group != [again.get(id(one), nothing) for one in mirrored[name][::-1]]:
            raise InfeasibleError(
                f"optimizer: treats parameters of group {name!r} by their places, where each "
                "rank has others (give group_of=, and each group its own settings)"
            )
        kinds = [use for use, _ in of_group]
        is_whole = len(set(of_group)) > 1 or any(use.whole for use in kinds)
        uses[name] = GroupUse(is_whole, max((use.numbers for use in kinds), default=0))
    return uses


def _uses(optimizer: optim.Optimizer) -> dict[int, tuple[GroupUse, str]]:
    """What an optimizer does with each parameter, by its identity, and the place and options of
    what updates it."""
    found: dict[int, tuple[GroupUse, str]] = {}
    for place, part in enumerate(parts_of(optimizer)):
        hooks = [one for name, one in vars(part).items() if "hook" in name or name == "step"]
        whole = type(part) not in _ELEMENTWISE or any(hooks)
        for group in part.param_groups:
            plain = {key: value for key, value in group.items() if key != "params"}
            numbers = _KEPT.get(type(part), 2) + sum(bool(group.get(name)) for name in _MORE)
            use = GroupUse(whole, numbers), f"{place} {plain}"
            found |= dict.fromkeys(map(id, group["params"]), use)
    return found


def _made_empty(
    asked: MakeOptimizer, shapes: Shapes, device: torch.device
) -> tuple[dict[str, list[nn.Parameter]], optim.Optimizer]:
    """Parameters without memory, by group, and the optimizer of them, which takes no step."""
    empty = torch.zeros((), device=device)
    groups = {
        name: [nn.Parameter(empty.expand(shape)) for shape in group]
        for name, group in shapes.items()
    }
    return groups, made_optimizer(asked, groups)
