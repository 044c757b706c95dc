"""Cuts by cost: no way of cutting between blocks has a smaller largest rank."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baselines.zeropp.contender import ZEROPP, ZeroppKnobs
from tests.unit.simulated_task import task
from zeropp.choose.task import Candidate
from zeropp.price import balanced_cuts, price_plan
from zeropp.price.communication import collectives_of, stage_parameters
from zeropp.price.programs import program_named
from zeropp.price.simulator import simulate
from zeropp.schedule.cuts import cut_layers, spread_blocks
from zeropp.schedule.plan import SizedPlan
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


def test_layers_that_cost_nothing_are_cut_all_the_same() -> None:
    """Views alone between two products, for example."""
    assert cut_layers([1.0, 0.0, 0.0, 2.0], loop_placement(2, 1)) in [
        (0, 1, 4),
        (0, 2, 4),
        (0, 3, 4),
    ]
    assert cut_layers([0.0] * 4, loop_placement(4, 1)) == (0, 1, 2, 3, 4)


def cut_at(place: int) -> SizedPlan:
    knobs = ZeroppKnobs(pp=2, shard=32, chunks=1, recompute="none")
    return replace(ZEROPP.size(task(), knobs, 1), cuts=(0, place, 48))


def test_embedding_and_head_are_no_blocks() -> None:
    plan = cut_at(20)
    assert plan.blocks == (19, 27)
    assert [plan.pieces_of(stage) for stage in range(2)] == [range(20), range(20, 48)]
    assert replace(plan, cuts=(0, 48)).blocks == (46,)
    assert replace(plan, cuts=(0, 1, 48)).blocks == (0, 46)


def test_a_block_costs_the_same_before_and_behind_a_cut() -> None:
    """Time and bytes, wherever the cut between two stages is: only the places differ."""
    prices = [price_plan(cut_at(place), task().cluster) for place in (20, 21, 22)]
    names: dict[str, tuple[str, ...]] = {
        "stages": ("forward", "backward_input", "backward_weight"),
        "memory": ("parameters", "optimizer", "activations", "deferred", "unsharded"),
    }
    for part, field in ((part, field) for part, fields in names.items() for field in fields):
        of_stages = [[getattr(one, field) for one in getattr(price, part)] for price in prices]
        totals = [sum(values) for values in of_stages]
        assert totals == pytest.approx([totals[0]] * 3, rel=1e-6), field
        assert of_stages[0][0] < of_stages[1][0] < of_stages[2][0], field


def test_a_chunk_has_a_collective_per_flat_buffer() -> None:
    plan = cut_at(20)
    for stage in range(2):  # weights, all else, and the end that is tied
        sizes = collectives_of(plan, program_named("zeropp"), stage)
        assert len(sizes) == 3
        assert sum(sizes) == pytest.approx(stage_parameters(plan, stage))
        assert len(collectives_of(plan, program_named("fsdp"), stage)) == 20 + 8 * stage


def test_crossings_of_the_replicas_slow_the_compute_beside_them() -> None:
    knobs = ZeroppKnobs(pp=2, shard=8, replicate=4, chunks=4, recompute="none")
    result = ZEROPP.simulated(task(), Candidate(knobs, 1))
    assert min(cost.reduce_replicas for cost in result.price.stages) > 0
    stages = tuple(replace(cost, reduce_replicas=0.0) for cost in result.price.stages)
    free = replace(result.price, stages=stages)
    alone = simulate(result.plan, task().cluster, price=free)
    assert all(a < b for a, b in zip(alone.events.busy, result.events.busy, strict=True))


@given(st.integers(1, 10), st.integers(1, 12))
def test_cuts_are_contiguous_and_give_every_stage_a_piece(stages: int, layers: int) -> None:
    shape = replace(task().shape, layers=layers)
    if stages > shape.num_pieces:
        with pytest.raises(ValueError, match="stages"):
            balanced_cuts(shape, stages)
        return
    cuts = balanced_cuts(shape, stages)
    assert cuts[0] == 0
    assert cuts[-1] == shape.num_pieces
    assert all(a < b for a, b in pairwise(cuts))
