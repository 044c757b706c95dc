"""What one rank updates of a flat buffer: tensors that the optimizer holds, each a stretch of it.

At first there is one tensor per optimizer group, however many parameters lie in it, so that one
kernel updates them all. In one process, an optimizer skips a parameter that has no gradient in a
step, and what it keeps of a parameter (Adam's number of steps) begins with the parameter's first
gradient. So where parameters of one tensor part ways, because only some of them have a gradient or
because a checkpoint says so, the tensor is split between them. The new tensors share the memory of
the old one, and so does what the optimizer keeps of them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from zeropp.engine.flat_layout import Slot, Stretch
from zeropp.optimizer import clip_factor

Kind = TypeVar("Kind")


@dataclass(frozen=True)
class Owned:
    """A tensor in the optimizer: the stretch of the flat buffer that it is, and the name of its
    optimizer group."""

    group: str
    stretch: Stretch
    tensor: nn.Parameter


@dataclass
class Updater:
    """The optimizer of one rank. ``groups``: the name of the optimizer group of a tensor, by the
    tensor's identity. ``clip_norm``: the largest global gradient norm (0: no clipping).
    ``lr_schedule``: the factor on the learning rate, by the number of steps done."""

    optimizer: torch.optim.Optimizer
    groups: dict[int, str]
    clip_norm: float = 0.0
    lr_schedule: Callable[[int], float] | None = None

    def __post_init__(self) -> None:
        self._rates = [group["lr"] for group in self.optimizer.param_groups]

    def set_rates(self, steps_done: int) -> None:
        """Set the learning rates of a step, if there is a schedule."""
        if self.lr_schedule is not None:
            factor = self.lr_schedule(steps_done)
            for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
                group["lr"] = rate * factor

    def clip(self, norm: float) -> None:
        """Scale the gradients down if their global norm is too large; see ``clip_factor``."""
        if (factor := clip_factor(norm, self.clip_norm)) == 1.0:
            return
        for group in self.optimizer.param_groups:
            for tensor in group["params"]:
                if tensor.grad is not None:
                    tensor.grad.mul_(factor)

    def split(self, one: Owned, stretches: Sequence[Stretch]) -> list[Owned]:
        """Put several tensors in the place of one, whose stretch they make up; the one's state and
        gradient are divided among them."""
        if len(stretches) == 1:
            return [one]
        made = [self._cut(one, stretch) for stretch in stretches]
        for group in self.optimizer.param_groups:
            group["params"] = [
                tensor
                for before in group["params"]
                for tensor in ([new.tensor for new in made] if before is one.tensor else [before])
            ]
        self.optimizer.state.pop(one.tensor, None)
        del self.groups[id(one.tensor)]
        return made

    def _cut(self, one: Owned, stretch: Stretch) -> Owned:
        inside, whole = stretch.inside(one.stretch), one.tensor
        part = nn.Parameter(whole.detach()[inside])
        if whole.grad is not None:
            part.grad = whole.grad[inside]
        if whole in self.optimizer.state:
            kept = self.optimizer.state[whole]
            self.optimizer.state[part] = {
                kind: value[inside] if is_of_elements(value, whole) else copy.deepcopy(value)
                for kind, value in kept.items()
            }
        self.groups[id(part)] = one.group
        return Owned(one.group, stretch, part)


def is_of_elements(value: Any, tensor: Tensor) -> bool:
    """Whether what an optimizer keeps of a tensor is one number per element of it."""
    return isinstance(value, Tensor) and value.shape == tensor.shape


def runs(
    one: Owned, slots: Iterable[Slot], kind: Callable[[Slot], Kind]
) -> list[tuple[Stretch, Kind]]:
    """The stretch of one tensor, cut between parameters of different kinds; with the kinds."""
    begins: list[tuple[int, Kind]] = []
    for slot in slots:
        if slot.group == one.group and len(slot.stretch.meet(one.stretch)):
            found = kind(slot)
            if not begins or begins[-1][1] != found:
                begins.append((slot.begin if begins else one.stretch.begin, found))
    ends = [*(begin for begin, _ in begins), one.stretch.end]
    return [
        (Stretch(begin, end), found)
        for (begin, end), (_, found) in zip(pairwise(ends), begins, strict=True)
    ]
