"""Where parameters lie in a flat buffer, and which stretch of it a rank keeps and updates.

Arithmetic alone. A flat buffer holds parameters one after another, those of one optimizer group
side by side, so that a rank's stretch of the buffer has at most one stretch of each group. Every
shard rank keeps an equal part; under ZeRO-1 (arXiv 1910.02054) every replica updates an equal part
of that. What does not divide is padded with zeros.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

# Elements. Every parameter and every part begins at a multiple of 16 bytes (bf16: what the
# vectorised loads of matrix products and fused kernels need).
ALIGNMENT = 8

Name = tuple[int, str]  # piece of the model, parameter or buffer of the piece


@dataclass(frozen=True)
class Stretch:
    """Elements ``begin`` to ``end`` of a flat buffer, the last one excluded."""

    begin: int
    end: int

    def __len__(self) -> int:
        return self.end - self.begin

    def meet(self, other: Stretch) -> Stretch:
        """What two stretches have in common; possibly empty."""
        begin = max(self.begin, other.begin)
        return Stretch(begin, max(begin, min(self.end, other.end)))

    def inside(self, other: Stretch) -> slice:
        """This stretch as a slice of a tensor that holds ``other``."""
        return slice(self.begin - other.begin, self.end - other.begin)


@dataclass(frozen=True)
class Slot:
    """One parameter's place in a flat buffer. ``names``: all names that it has in the model."""

    names: tuple[Name, ...]
    shape: tuple[int, ...]
    group: str  # of the optimizer
    begin: int

    @property
    def stretch(self) -> Stretch:
        """Its elements in the buffer."""
        return Stretch(self.begin, self.begin + prod(self.shape))


@dataclass(frozen=True)
class FlatLayout:
    """Slots in a buffer of ``size`` elements; ``part`` is what this rank's shard keeps of it and
    ``owned`` what this rank updates."""

    slots: tuple[Slot, ...]
    size: int
    part: Stretch
    owned: Stretch

    def groups(self) -> Iterator[tuple[str, Stretch]]:
        """What this rank updates of every optimizer group, where that is anything."""
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
    """How a buffer is cut: this rank's place among shards, and among the replicas that split the
    optimizer's work (one, where they do not)."""

    shard: int = 0
    shards: int = 1
    row: int = 0
    rows: int = 1


def lay_out(
    parameters: Iterable[tuple[tuple[Name, ...], Sequence[int], str]], cut: Cut
) -> FlatLayout:
    """Place (names, shape, optimizer group) in a buffer; groups in the order of their first."""
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
