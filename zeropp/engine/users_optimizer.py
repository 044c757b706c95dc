"""A caller's optimizer is tried on a few numbers before it is given the model's.

The trial finds which groups can be given flat shards of parameters, because the optimizer works
element by element there, and which need whole parameters, because it looks at their shapes or at
other elements of them (Muon, Shampoo, Adafactor).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn

from zeropp.engine.errors import refusal
from zeropp.engine.settings import MakeOptimizer
from zeropp.engine.update_rules import Groups, Optimizers, is_of_elements, made_optimizer
from zeropp.types.layout import InfeasibleError
from zeropp.types.training import OptimizerConfig

# Two matrices, with which an optimizer is tried: large enough for those that keep the state of
# small tensors in another way than that of others (in 32 bits instead of 8).
_MATRIX = (64, 128)
_ELEMENTS = prod(_MATRIX)
_LR = 0.1  # of trials, because a schedule may begin with 0


@dataclass(frozen=True)
class Trial:
    """What a trial has found: the groups whose parameters must be whole, and the bytes that the
    optimizer keeps of each element, by group."""

    whole: tuple[str, ...]
    state_bytes: Mapping[str, float]


def try_optimizer(
    asked: OptimizerConfig | MakeOptimizer, names: Sequence[str], device: torch.device
) -> Trial:
    """Try an optimizer on two matrices per group, for two steps; ``asked`` is called once for that,
    and two or three times for each group.

    A group is given flat shards if it updates both matrices like one row of as many numbers, and
    keeps of a tensor one number, or one per element. Raises InfeasibleError for an optimizer that
    updates a parameter by looking at others, which may be on other ranks, or that keeps what no
    other topology could load.
    """
    both = {name: [_MATRIX] * 2 for name in names or ["all"]}
    optimizer, groups = _steps(asked, both, device)
    kind, whole = _kind(optimizer), []
    state_bytes = {name: _state_bytes(optimizer, parts[0], kind) for name, parts in groups.items()}
    for name, (first, second) in groups.items():
        alone = both | {name: [_MATRIX]}
        if not _same(_steps(asked, alone, device)[1][name][0], first):
            raise InfeasibleError(
                f"optimizer: {kind} updates a parameter in another way beside others than alone, "
                "but no rank has all parameters (take one that updates each by itself; clip_norm= "
                "clips by the norm of all)"
            )
        try:
            flat, rows = _steps(asked, both | {name: [(2 * _ELEMENTS,)]}, device)
            row = rows[name][0]
            is_same = _same(row, torch.cat([first.flatten(), second.flatten()]))
            kept = [x for x in flat.state.get(row, {}).values() if isinstance(x, Tensor)]
            # It can be cut if it is one number per element, or one for all.
            if is_same and all(is_of_elements(x, row) or not x.dim() for x in kept):
                continue
        except InfeasibleError:
            pass
        whole.append(name)
        if not _same(_steps(asked, alone, device, late=True)[1][name][0], first):
            raise InfeasibleError(
                f"optimizer: {kind} needs whole parameters, and reads them when it is made, but "
                "they are whole in its steps alone (let it read them in its first step)"
            )
    return Trial(tuple(whole), state_bytes)


def _steps(
    asked: OptimizerConfig | MakeOptimizer,
    shapes: Mapping[str, Sequence[tuple[int, ...]]],
    device: torch.device,
    *,
    late: bool = False,
) -> tuple[torch.optim.Optimizer, Groups]:
    """An optimizer of tensors of these shapes, by group, after two steps. The numbers of a group
    are the same in any shape; tensors have them, or with ``late`` they are NaN until the optimizer
    is made."""
    groups: dict[str, list[nn.Parameter]] = {}
    numbers: list[tuple[nn.Parameter, Tensor, Tensor]] = []
    for name, parts in shapes.items():
        generator, sizes = torch.Generator().manual_seed(0), [prod(shape) for shape in parts]
        drawn = torch.randn(2, 2 * _ELEMENTS, generator=generator)[:, : sum(sizes)].to(device)
        groups[name] = []
        for shape, piece in zip(parts, torch.split(drawn, sizes, dim=1), strict=True):
            values, gradient = (row.view(shape).clone() for row in piece)
            groups[name].append(nn.Parameter(values * torch.nan if late else values))
            numbers.append((groups[name][-1], values, gradient))
    optimizer = made_optimizer(asked, groups)
    for parameter, values, gradient in numbers:
        parameter.data, parameter.grad = values, gradient
    with refusal(f"optimizer: {_kind(optimizer)} cannot take a step"):
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * 0 + _LR
        optimizer.step()
        optimizer.step()
    return optimizer, groups


def _same(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-5, atol=1e-6, equal_nan=True)


def _kind(optimizer: torch.optim.Optimizer) -> str:
    parts = optimizer.parts if isinstance(optimizer, Optimizers) else [optimizer]
    return " and ".join(dict.fromkeys(type(part).__name__ for part in parts))


def _state_bytes(optimizer: torch.optim.Optimizer, tensor: nn.Parameter, kind: str) -> float:
    """Bytes that an optimizer keeps of each element of a tensor; raises InfeasibleError for what no
    checkpoint could hold."""
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
