"""Where parameters are in a flat buffer, and which stretch of it a rank keeps and updates.

A *stretch* is a range of consecutive elements. A flat buffer holds parameters one after another,
those of one optimizer group next to each other, so that a rank's stretch has at most one stretch of
each group. Every rank of a shard group keeps an equal part; with ZeRO-1 (arXiv 1910.02054) every
replica updates an equal part of that. The buffer is padded with zeros so that it divides.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from zeropp.optimizer import clip_factor

# Elements. Every parameter and every part begins at a multiple of 16 bytes, also in bf16, because
# the vectorised loads of matrix products and fused kernels need that.
ALIGNMENT = 8

Name = tuple[int, str]  # piece of the model, parameter or buffer of the piece


@dataclass(frozen=True)
class Stretch:
    """The elements from ``begin`` up to, but without, ``end`` of a flat buffer."""

    begin: int
    end: int

    def __len__(self) -> int:
        return self.end - self.begin

    def meet(self, other: Stretch) -> Stretch:
        """The common elements of two stretches, which may be none."""
        begin = max(self.begin, other.begin)
        return Stretch(begin, max(begin, min(self.end, other.end)))

    def inside(self, other: Stretch) -> slice:
        """This stretch as a slice of a tensor that holds ``other``."""
        return slice(self.begin - other.begin, self.end - other.begin)


@dataclass(frozen=True)
class Slot:
    """One parameter's place in a flat buffer; ``names`` are all its names in the model."""

    names: tuple[Name, ...]
    shape: tuple[int, ...]
    group: str  # of the optimizer
    begin: int

    @property
    def stretch(self) -> Stretch:
        """The elements of the parameter in the buffer."""
        return Stretch(self.begin, self.begin + prod(self.shape))


@dataclass(frozen=True)
class FlatLayout:
    """The slots of a buffer of ``size`` elements. ``part`` is the stretch that this rank's shard
    keeps, and ``owned`` the one that this rank updates."""

    slots: tuple[Slot, ...]
    size: int
    part: Stretch
    owned: Stretch

    def groups(self) -> Iterator[tuple[str, Stretch]]:
        """(optimizer group, the stretch of it that this rank updates), without empty ones."""
        whole: dict[str, Stretch] = {}
        for slot in self.slots:
            first = whole.setdefault(slot.group, slot.stretch)
            whole[slot.group] = Stretch(first.begin, slot.stretch.end)
        for group, stretch in whole.items():
            mine = stretch.meet(self.owned)
            if len(mine):
                yield group, mine


@dataclass(frozen=True)
class Cut:
    """How a buffer is cut: this rank's index among ``shards``, and its ``row`` among the ``rows``
    replicas that divide the optimizer's work (one row without ZeRO-1)."""

    shard: int = 0
    shards: int = 1
    row: int = 0
    rows: int = 1


def lay_out(
    parameters: Iterable[tuple[tuple[Name, ...], Sequence[int], str]], cut: Cut
) -> FlatLayout:
    """Lay out parameters, given as (names, shape, optimizer group), in a buffer. Groups come in the
    order of their first parameters."""
    waiting = list(parameters)
    order = list(dict.fromkeys(group for _, _, group in waiting))
    slots, end = [], 0
    for names, shape, group in sorted(waiting, key=lambda one: order.index(one[2])):
        slots.append(Slot(names, tuple(shape), group, end))
        end = _aligned(slots[-1].stretch.end, ALIGNMENT)
    size = _aligned(end, ALIGNMENT * cut.shards * cut.rows)
    part = size // cut.shards
    row = part // cut.rows
    begin = cut.shard * part
    first = begin + cut.row * row
    return FlatLayout(tuple(slots), size, Stretch(begin, begin + part), Stretch(first, first + row))


def _aligned(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


# What one rank updates of a flat buffer: tensors that the optimizer holds, each a stretch of it.
#
# At first there is one tensor per optimizer group, however many parameters lie in it, so that one
# kernel updates them all. In one process, an optimizer skips a parameter that has no gradient in a
# step, and what it keeps of a parameter (Adam's number of steps) begins with the parameter's first
# gradient. So where parameters of one tensor part ways, because only some of them have a gradient
# or because a checkpoint says so, the tensor is split between them. The new tensors share the
# memory of the old one, and so does what the optimizer keeps of them.


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
