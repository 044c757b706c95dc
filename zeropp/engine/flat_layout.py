"""Where parameters are in a flat buffer, and which stretch of it a rank keeps and updates.

A *stretch* is a range of consecutive elements. A flat buffer holds parameters one after another,
those of one optimizer group next to each other, so that a rank's stretch has at most one stretch of
each group. Every rank of a shard group keeps an equal part; with ZeRO-1 (arXiv 1910.02054) every
replica updates an equal part of that. The buffer is padded with zeros so that it divides.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

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
