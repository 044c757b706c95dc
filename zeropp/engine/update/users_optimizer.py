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
_KEPT = {optim.SGD: 0, optim.Muon: 0, optim.RMSprop: 1, optim.ASGD: 1, optim.Adagrad: 1}
_MORE = ("momentum", "centered", "amsgrad")  # each of these options keeps one number more
Shapes = Mapping[str, Sequence[tuple[int, ...]]]


def groups_whole(asked: MakeOptimizer, shapes: Shapes, device: torch.device) -> tuple[str, ...]:
    """The groups, of parameters of these ``shapes``, that an optimizer is to get whole. A group
    whose parameters it treats in different ways (no decay of vectors) is whole, too. Raises
    InfeasibleError if these go by places in a group, which are others on every rank."""
    groups, optimizer = _made_empty(asked, shapes, device)
    mirrored, other = _made_empty(asked, {n: of[::-1] for n, of in shapes.items()}, device)
    settings, otherwise = _settings(optimizer), _settings(other)
    for name, members in groups.items():
        for one, same in zip(members, mirrored[name][::-1], strict=True):
            if settings.get(id(one)) != otherwise.get(id(same)):
                raise InfeasibleError(
                    f"optimizer: treats parameters of group {name!r} by their places, where each "
                    "rank has others (give group_of=, and each group its own settings)"
                )
    # What is in no group is refused by name when the optimizer is made of real ones.
    kinds = {n: {settings.get(id(x), (True, "")) for x in group} for n, group in groups.items()}
    return tuple(name for name, of in kinds.items() if len(of) > 1 or not all(k for k, _ in of))


def _settings(optimizer: optim.Optimizer) -> dict[int, tuple[bool, str]]:
    """Whether a parameter is updated element by element, and the place and options of what updates
    it, by the parameter's identity."""
    found: dict[int, tuple[bool, str]] = {}
    for place, part in enumerate(parts_of(optimizer)):
        hooks = [one for name, one in vars(part).items() if "hook" in name or name == "step"]
        known = type(part) in _ELEMENTWISE and not any(hooks)
        for group in part.param_groups:
            plain = {key: value for key, value in group.items() if key != "params"}
            found |= {id(one): (known, f"{place} {plain}") for one in group["params"]}
    return found


def numbers_kept(asked: MakeOptimizer, shapes: Shapes, device: torch.device) -> dict[str, int]:
    """How many numbers an optimizer keeps of an element of a group's parameters, by what torch's
    own keep; any other is taken to keep two, and one more for a momentum."""
    groups, optimizer = _made_empty(asked, shapes, device)
    kept = {
        id(one): _KEPT.get(type(part), 2) + sum(bool(group.get(name)) for name in _MORE)
        for part in parts_of(optimizer)
        for group in part.param_groups
        for one in group["params"]
    }
    return {name: max((kept.get(id(x), 0) for x in of), default=0) for name, of in groups.items()}


def _made_empty(
    asked: MakeOptimizer, shapes: Shapes, device: torch.device
) -> tuple[dict[str, list[nn.Parameter]], optim.Optimizer]:
    """Parameters without memory, by group, and the optimizer of them, which takes no step."""

    def made(where: torch.device) -> tuple[dict[str, list[nn.Parameter]], optim.Optimizer]:
        empty = torch.zeros((), device=where)
        groups = {
            name: [nn.Parameter(empty.expand(shape)) for shape in group]
            for name, group in shapes.items()
        }
        return groups, made_optimizer(asked, groups)

    try:
        return made(torch.device("meta"))
    except InfeasibleError:  # which says why, here or there
        return made(device)
