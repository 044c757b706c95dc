"""Flat buffers: every element has one owner, whatever the sizes."""

from __future__ import annotations

from itertools import pairwise

import pytest

from zeropp.engine.parameters.flat_layout import ALIGNMENT, FlatLayout, Partition, lay_out

SHAPES = [(3, 5), (), (7,), (0, 4), (2, 2, 2), (31,)]


def layouts(shards: int, rows: int, whole: tuple[str, ...] = ()) -> list[FlatLayout]:
    """The same parameters as every rank sees them."""
    parameters = [
        (((0, str(place)),), shape, "decay" if len(shape) > 1 else "plain")
        for place, shape in enumerate(SHAPES)
    ]
    return [
        lay_out(parameters, Partition(shard, shards, row, rows), whole)
        for row in range(rows)
        for shard in range(shards)
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


@pytest.mark.parametrize(("shards", "rows"), [(1, 1), (2, 1), (3, 2), (1, 3), (40, 1)])
@pytest.mark.parametrize("whole", [("decay",), ("plain",), ("decay", "plain")], ids=str)
def test_each_whole_parameter_is_updated_by_one_rank_and_the_others_in_parts(
    shards: int, rows: int, whole: tuple[str, ...]
) -> None:
    found = layouts(shards, rows, whole)
    assert len({(layout.slots, layout.size, layout.spans) for layout in found}) == 1
    assert [layout.rank for layout in found] == [*range(shards * rows)]
    assert [layout.owned for layout in found] == [*found[0].all_owned]
    updated = [slot for layout in found for slot in layout.whole_slots()]
    assert sorted(updated, key=lambda slot: slot.begin) == [
        slot for slot in found[0].slots if slot.group in whole and len(slot.elements)
    ]
    for layout, span in zip(found, found[0].spans, strict=True):
        for slot in layout.whole_slots():
            assert len(slot.elements.intersect(span)) == len(slot.elements)
    assert all(first.end == then.begin for first, then in pairwise(found[0].spans))
    assert {name for layout in found for name, _ in layout.groups()}.isdisjoint(whole)


def test_whole_parameters_are_shared_out_by_size_and_every_buffer_begins_elsewhere() -> None:
    for layer, expected in (0, [80, 64]), (1, [64, 80]):
        parameters = [(((layer, str(n)),), (n,), "all") for n in (16, 64, 32, 32)]
        spans = lay_out(parameters, Partition(0, 2), ["all"]).spans
        assert [len(span) for span in spans] == expected
