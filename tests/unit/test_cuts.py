"""Cuts by cost: no way of cutting between blocks has a smaller largest rank."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zeropp.cost.cuts import spread_blocks
from zeropp.schedule.program import loop_placement, v_placement


def work_of_ranks(
    cuts: tuple[int, ...], layers: int, stage_rank: tuple[int, ...], ends: tuple[float, float]
) -> list[float]:
    weights = [ends[0], *([1.0] * layers), ends[1]]
    work = [0.0] * (max(stage_rank) + 1)
    for rank, (first, last) in zip(stage_rank, pairwise(cuts), strict=True):
        assert last > first
        work[rank] += sum(weights[first:last])
    return work


@settings(max_examples=80, deadline=None)
@given(
    st.sampled_from([loop_placement(2, 2), loop_placement(3, 1), loop_placement(2, 1)])
    | st.sampled_from([v_placement(2), loop_placement(1, 1), loop_placement(1, 3)]),
    st.integers(4, 9),
    st.floats(0.0, 2.5),
    st.floats(0.0, 2.5),
)
def test_no_other_cut_has_a_smaller_largest_rank(
    stage_rank: tuple[int, ...], layers: int, embedding: float, head: float
) -> None:
    ends = (embedding, head)
    cuts = spread_blocks(layers, stage_rank, *ends)
    found = max(work_of_ranks(cuts, layers, stage_rank, ends))
    inner = combinations(range(1, layers + 2), len(stage_rank) - 1)
    every = [(0, *cut, layers + 2) for cut in inner]
    assert every
    best = min(max(work_of_ranks(cut, layers, stage_rank, ends)) for cut in every)
    assert found == pytest.approx(best)


def test_light_stages_come_first_and_the_heads_rank_has_fewer_blocks() -> None:
    sizes = [b - a for a, b in pairwise(spread_blocks(60, loop_placement(32, 1), 0.0, 0.4))]
    assert sizes == [
        2,
        1,
        1,
        *([2] * 28),
        2,
    ]  # the first 2: embedding, block; the last: block, head


def test_more_stages_than_pieces_are_refused() -> None:
    with pytest.raises(ValueError, match="9 stages for 6 pieces"):
        spread_blocks(4, loop_placement(9, 1), 0.0, 0.0)
