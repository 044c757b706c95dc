"""Where parameters lie in a flat buffer, and which part of it each rank keeps and updates."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, starmap
from math import prod

from torch import Tensor, nn

# Elements. Every parameter and every part begins at a multiple of 16 bytes, also in bf16, because
# the vectorised loads of matrix products and fused kernels need that.
ALIGNMENT = 8

Name = tuple[int, str]  # piece of the model, parameter or buffer of the piece


@dataclass(frozen=True)
class ElementRange:
    """The elements from ``begin`` up to, but without, ``end`` of a flat buffer."""

    begin: int
    end: int

    def __len__(self) -> int:
        return self.end - self.begin

    def intersect(self, other: ElementRange) -> ElementRange:
        """The common elements of two ranges, which may be none."""
        begin = max(self.begin, other.begin)
        return ElementRange(begin, max(begin, min(self.end, other.end)))

    def inside(self, other: ElementRange) -> slice:
        """This range as a slice of a tensor that holds ``other``."""
        return slice(self.begin - other.begin, self.end - other.begin)


@dataclass(frozen=True)
class Slot:
    """One parameter's place in a flat buffer; ``names`` are all its names in the model."""

    names: tuple[Name, ...]
    shape: tuple[int, ...]
    group: str  # of the optimizer
    begin: int

    @property
    def elements(self) -> ElementRange:
        """The elements of the parameter in the buffer."""
        return ElementRange(self.begin, self.begin + prod(self.shape))

    def view(self, buffer: Tensor) -> Tensor:
        """The parameter, in its own shape, in a tensor of the buffer's size."""
        return buffer[self.begin : self.elements.end].view(self.shape)


@dataclass(frozen=True)
class FlatLayout:
    """The slots of a buffer of ``size`` elements. ``part`` is the range that this rank's shard
    keeps, and ``all_owned[rank]`` the one that this rank is to update.

    Parameters that are updated whole are the last ones: those in ``spans[i]`` by rank ``i``, which
    keeps parts of them only. There are no spans if nothing is updated whole.
    """

    slots: tuple[Slot, ...]
    size: int
    part: ElementRange
    all_owned: tuple[ElementRange, ...]
    rank: int
    spans: tuple[ElementRange, ...] = ()

    @property
    def owned(self) -> ElementRange:
        """The range that this rank updates, except what is updated whole."""
        return self.all_owned[self.rank]

    def groups(self) -> Iterator[tuple[str, ElementRange]]:
        """(optimizer group, the range of it that this rank updates), without empty ones and without
        groups that are updated whole."""
        first_whole = self.spans[0].begin if self.spans else self.size
        ranges: dict[str, ElementRange] = {}
        for slot in self.slots:
            if slot.begin < first_whole:
                first = ranges.setdefault(slot.group, slot.elements)
                ranges[slot.group] = ElementRange(first.begin, slot.elements.end)
        for group, elements in ranges.items():
            common = elements.intersect(self.owned)
            if len(common):
                yield group, common

    def whole_slots(self) -> list[Slot]:
        """The parameters that this rank updates whole."""
        span = self.spans[self.rank] if self.spans else ElementRange(0, 0)
        return [slot for slot in self.slots if len(slot.elements.intersect(span))]


@dataclass(frozen=True)
class OptimizerShard:
    """A tensor in the optimizer: the range of the flat buffer that it is, and the name of its
    optimizer group. However many parameters lie in it, one kernel updates them all; one that is
    updated whole is a tensor of its own, in its own shape."""

    group: str
    elements: ElementRange
    tensor: nn.Parameter


Member = tuple[tuple[Name, ...], Sequence[int], str]  # names, shape, optimizer group


def lay_out(
    parameters: Iterable[Member],
    whole: Collection[str] = (),
    *,
    shard: int = 0,
    shards: int = 1,
    row: int = 0,
    rows: int = 1,
) -> FlatLayout:
    """Lay out parameters one after another in a buffer; those of the groups ``whole`` are updated
    whole. Ranks divide it: this one's index is ``shard`` of ``shards``, and ``row`` of the ``rows``
    replicas that divide the optimizer's work (ZeRO-1, arXiv 1910.02054; else one row).

    Groups come in the order of their first parameters, each in one piece, so that a rank has at
    most one range of each; but the last parameters are those that are updated whole, rank by rank.
    The buffer is padded with zeros so that all parts are equal. Ranks are numbered row by row, as
    in their process group.
    """
    members, ranks = list(parameters), rows * shards
    order = list(dict.fromkeys(group for _, _, group in members))
    members.sort(key=lambda member: order.index(member[2]))
    lists = [[member for member in members if member[2] not in whole]]
    lists += _shared_out([member for member in members if member[2] in whole], ranks)
    slots: list[Slot] = []
    ends = [0]
    for each in lists:
        for names, shape, group in each:
            slots.append(Slot(names, tuple(shape), group, ends[-1]))
            ends[-1] = _aligned(slots[-1].elements.end, ALIGNMENT)
        ends.append(ends[-1])
    size = _aligned(ends[-1], ALIGNMENT * ranks)
    part = size // shards
    own = part // rows
    owned = tuple(
        ElementRange(other * part + index * own, other * part + (index + 1) * own)
        for index in range(rows)
        for other in range(shards)
    )
    kept = ElementRange(shard * part, (shard + 1) * part)
    spans = tuple(starmap(ElementRange, pairwise(ends[:-1]))) if any(lists[1:]) else ()
    return FlatLayout(tuple(slots), size, kept, owned, row * shards + shard, spans)


def _shared_out(members: Sequence[Member], ranks: int) -> list[list[Member]]:
    """Share whole parameters out, the largest first, each to the rank with the fewest elements."""
    lists: list[list[Member]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    first = members[0][0][0][0] if members else 0
    turn = [(first + index) % ranks for index in range(ranks)]
    for member in sorted(members, key=lambda member: -prod(member[1])):
        rank = min(turn, key=lambda rank: loads[rank])
        lists[rank].append(member)
        loads[rank] += prod(member[1])
    return lists


def _aligned(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
