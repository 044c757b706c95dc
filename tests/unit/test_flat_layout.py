"""Flat buffers: every element has one owner, whatever the sizes."""

from __future__ import annotations

from itertools import pairwise

import pytest

from zeropp.engine.flat import ALIGNMENT, FlatLayout, Partition, lay_out

SHAPES = [(3, 5), (), (7,), (0, 4), (2, 2, 2), (31,)]


def layouts(shards: int, rows: int) -> list[FlatLayout]:
    """The same parameters as every rank sees them."""
    parameters = [
        (((0, str(place)),), shape, "decay" if len(shape) > 1 else "plain")
        for place, shape in enumerate(SHAPES)
    ]
    return [
        lay_out(parameters, Partition(shard, shards, row, rows))
        for shard in range(shards)
        for row in range(rows)
    ]


@pytest.mark.parametrize(("shards", "rows"), [(1, 1), (2, 1), (3, 2), (1, 3), (40, 1)])
def test_ranks_own_every_element_once_in_equal_parts(shards: int, rows: int) -> None:
    found = layouts(shards, rows)
    owned = sorted((layout.owned.begin, layout.owned.end) for layout in found)
    assert owned[0][0] == 0
    assert owned[-1][1] == found[0].size
    assert all(end == begin for (_, end), (begin, _) in pairwise(owned))
    assert len({len(layout.part) for layout in found}) == 1


@pytest.mark.parametrize(("shards", "rows"), [(1, 1), (2, 1), (3, 2), (40, 1)])
def test_a_rank_has_one_range_of_a_group_and_groups_cover_all_parameters(
    shards: int, rows: int
) -> None:
    found = layouts(shards, rows)
    assert found[0].slots
    for slot in found[0].slots:
        assert slot.begin % ALIGNMENT == 0
        ranges = [dict(layout.groups()).get(slot.group) for layout in found]
        covered = sum(len(slot.elements.intersect(elements)) for elements in ranges if elements)
        assert covered == len(slot.elements)
