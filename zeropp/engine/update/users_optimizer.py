"""A caller's optimizer is tried on a few numbers before it is given the model's.

Groups are given flat shards of parameters where optimizers of torch update them that work element
by element, and where a caller says that his do. All others are given whole parameters, as an
optimizer may look at their shapes or at other elements of them (Muon, Shampoo, Adafactor), and no
trial shows that it never will.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn, optim

from zeropp.engine.ranks.errors import refusal
from zeropp.engine.settings import MakeOptimizer
from zeropp.engine.update.update_rules import (
    Groups,
    is_of_elements,
    is_plain,
    made_optimizer,
    own_numbers,
    parts_of,
)
from zeropp.types.layout import InfeasibleError
from zeropp.types.training import OptimizerConfig

_ELEMENTWISE = (
    *(optim.SGD, optim.ASGD, optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax),
    *(optim.Adagrad, optim.Adadelta, optim.RMSprop, optim.Rprop),
)
_MATRIX = (16, 24)  # with which an optimizer is tried, and as many of them as other ranks need
# One more, whose bytes are counted: large enough for those that keep the state of small
# tensors in another way than that of others (in 32 bits instead of 8).
_COUNTED = (64, 128)
_DRAWN = 2**17  # random numbers, more than all of these take
_LR = 0.1  # of trials, because a schedule may begin with 0

Shapes = Mapping[str, Sequence[tuple[int, ...]]]  # by optimizer group


@dataclass(frozen=True)
class Trial:
    """What a trial has found: the groups whose parameters must be whole, and the bytes that the
    optimizer keeps of each element, by group."""

    whole: tuple[str, ...]
    state_bytes: Mapping[str, float]


def try_optimizer(
    asked: OptimizerConfig | MakeOptimizer,
    shapes: Shapes,
    device: torch.device,
    *,
    elementwise: bool = False,
) -> Trial:
    """Try an optimizer of parameters of these shapes. ``asked`` is called once with all shapes, on
    the meta device; once for two steps with a few tensors of the same ranks, where they are small;
    once more for optimizers that are none of torch's element by element, and, where the caller says
    that these work so, too (``elementwise``), for each of their groups, which is whole where the
    trial shows otherwise.

    Raises InfeasibleError for an optimizer that updates a parameter by looking at others, which may
    be on other ranks, or that keeps what no other topology could load.
    """
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        known = _alike(asked, shapes, device)
        ranks = {name: sorted(set(map(len, group)) or {2}) for name, group in shapes.items()}
        few = {name: [(2,) * (r - 2) + _MATRIX[:r] for r in of] for name, of in ranks.items()}
        counted = {name: [_COUNTED] if 2 in of else few[name][-1:] for name, of in ranks.items()}
        both = {name: [*few[name], *few[name], *counted[name]] for name in few}
        optimizer, tried = _steps(asked, both, device)
        kind = _kind(optimizer)
        _check_beside(optimizer, kind)
        state_bytes = {name: _state_bytes(optimizer, t[-1], kind) for name, t in tried.items()}
        flat = {name for name, is_known in known.items() if is_known}
        for name in known if elementwise else ():
            if name not in flat and _works_cut(asked, few, name, tried[name], device):
                flat.add(name)
        whole = tuple(name for name in shapes if name not in flat)
        if whole or elementwise:
            _check_alone(asked, few, device, (optimizer, tried))
        return Trial(whole, state_bytes)


def _alike(
    asked: OptimizerConfig | MakeOptimizer, shapes: Shapes, device: torch.device
) -> dict[str, bool]:
    """Of groups with the same settings for any shape: is the optimizer known to be element-wise?"""

    def settings(order: int) -> dict[str, list[tuple[bool, str]]]:
        def made(where: torch.device) -> tuple[Groups, optim.Optimizer]:
            empty = torch.zeros((), device=where)
            groups = {
                name: [nn.Parameter(empty.expand(shape)) for shape in group[::order]]
                for name, group in shapes.items()
            }
            return groups, made_optimizer(asked, groups)

        try:
            groups, optimizer = made(torch.device("meta"))
        except InfeasibleError:  # which says why, here or there
            groups, optimizer = made(device)
        found: dict[int, tuple[bool, str]] = {}
        for place, part in enumerate(parts_of(optimizer)):
            hooks = [x for name, x in vars(part).items() if "hook" in name or name == "step"]
            known = type(part) in _ELEMENTWISE and not any(hooks)
            for group in part.param_groups:
                plain = {key: value for key, value in group.items() if key != "params"}
                found |= {id(x): (known, f"{place} {plain}") for x in group["params"]}
        nothing = (False, "")  # which is refused by name when the optimizer is made
        return {n: [found.get(id(x), nothing) for x in g][::order] for n, g in groups.items()}

    first = settings(1)
    if all(len(set(group)) <= 1 for group in first.values()):
        return {name: group[0][0] if group else True for name, group in first.items()}
    if settings(-1) != first:
        raise InfeasibleError(
            "optimizer: gives parameters settings by their place among others, but no rank has "
            "all of them (give them groups by group_of=, which gets layers and names)"
        )
    return {name: group[0][0] for name, group in first.items() if len(set(group)) == 1}


def _check_alone(
    asked: OptimizerConfig | MakeOptimizer,
    few: Shapes,
    device: torch.device,
    beside: tuple[optim.Optimizer, Groups],
) -> None:
    """Refuse optimizers that update tensors in another way ``beside`` others than alone."""
    optimizer, tried = beside
    alone, tensors = _steps(asked, few, device)
    same = all(all(map(_same, group, tried[name])) for name, group in tensors.items())
    numbers = [
        [{k: v for k, v in g.items() if is_plain(v)} for g in one.param_groups]
        for one in (optimizer, alone)
    ]
    if not same or any(repr(a) != repr(b) for a, b in zip(*numbers, strict=False)):
        raise InfeasibleError(
            f"optimizer: {_kind(optimizer)} updates a parameter in another way beside others than "
            "alone, but no rank has all parameters (take one that updates each by itself; "
            "clip_norm= clips by the norm of all)"
        )


def _steps(
    asked: OptimizerConfig | MakeOptimizer, shapes: Shapes, device: torch.device
) -> tuple[optim.Optimizer, Groups]:
    """An optimizer of tensors of these shapes, by group, after two steps; numbers do not vary."""
    groups: dict[str, list[nn.Parameter]] = {}
    for name, parts in shapes.items():
        generator, sizes = torch.Generator().manual_seed(0), [prod(shape) for shape in parts]
        drawn = torch.randn(_DRAWN, 2, generator=generator)[: sum(sizes)].T.to(device)
        groups[name] = []
        for shape, piece in zip(parts, torch.split(drawn, sizes, dim=1), strict=True):
            values, gradient = (row.reshape(shape).clone() for row in piece)
            groups[name].append(nn.Parameter(values))
            groups[name][-1].grad = gradient
    optimizer = made_optimizer(asked, groups)
    with refusal(f"optimizer: {_kind(optimizer)} cannot take a step"):
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * 0 + _LR
        optimizer.step()
        optimizer.step()
    return optimizer, groups


def _works_cut(
    asked: OptimizerConfig | MakeOptimizer,
    few: Shapes,
    name: str,
    tensors: Sequence[Tensor],
    device: torch.device,
) -> bool:
    """Whether flat halves of a group's tensors are updated like the tensors, and may be cut."""
    halves = [((prod(shape) + more) // 2,) for shape in few[name] for more in (0, 1)]
    try:
        optimizer, groups = _steps(asked, {**few, name: halves}, device)
    except InfeasibleError:
        return False
    first, second = groups[name][::2], groups[name][1::2]
    kept = [(x, one) for one in second for x in optimizer.state.get(one, {}).values()]
    return all(
        map(_same, map(torch.cat, zip(first, second, strict=True)), map(torch.flatten, tensors))
    ) and all(is_of_elements(x, one) or not isinstance(x, Tensor) or not x.dim() for x, one in kept)


def _same(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-5, atol=1e-6, equal_nan=True)


def _kind(optimizer: optim.Optimizer) -> str:
    return " and ".join(dict.fromkeys(type(part).__name__ for part in parts_of(optimizer)))


def _check_beside(optimizer: optim.Optimizer, kind: str) -> None:
    """Refuse what an optimizer keeps beside its tensors and no checkpoint could hold."""
    for part in parts_of(optimizer):
        beside = own_numbers(part, part.state, vars(part)) | vars(part)
        for name, value in beside.items():
            is_own = name.startswith(("own ", "state ")) and not is_plain(value)
            if is_own or isinstance(value, optim.Optimizer):
                raise InfeasibleError(
                    f"optimizer: {kind} keeps {name!r}, which is of type {type(value).__name__}, "
                    "beside the state of its parameters, so that no checkpoint could hold it (take "
                    "one that keeps numbers there)"
                )


def _state_bytes(optimizer: optim.Optimizer, tensor: nn.Parameter, kind: str) -> float:
    """Bytes kept of each element of a tensor; refuses what no checkpoint could hold."""
    values = optimizer.state.get(tensor, {})
    for name, value in values.items():
        if not (value is None or isinstance(value, bool | int | float | Tensor)):
            raise InfeasibleError(
                f"optimizer: {kind} keeps {name!r} of a parameter, which is of type "
                f"{type(value).__name__}, so that no checkpoint could hold it (take one that keeps "
                "tensors and numbers)"
            )
    tensors = [value for value in values.values() if isinstance(value, Tensor) and value.dim()]
    return sum(value.nbytes for value in tensors) / tensor.numel()
