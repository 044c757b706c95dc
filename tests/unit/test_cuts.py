"""Cuts by cost: no way of cutting between blocks has a smaller largest rank, and cuts inside blocks
lose nothing."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.simulated_task import task
from zeropp.contender.contender import ZEROPP, ZeroppKnobs
from zeropp.cost import balanced_cuts, price_plan
from zeropp.cost.communication import collectives_of, stage_parameters
from zeropp.cost.cuts import largest_work, spread_blocks, spread_halves
from zeropp.layout import InfeasibleError
from zeropp.plan import Candidate, SizedPlan
from zeropp.programs import program_named
from zeropp.schedule.program import loop_placement, v_placement
from zeropp.sim.simulator import simulate


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


@settings(max_examples=80, deadline=None)
@given(
    st.sampled_from([loop_placement(2, 2), loop_placement(4, 3), loop_placement(3, 1)])
    | st.sampled_from([v_placement(3), loop_placement(8, 2), loop_placement(6, 4)]),
    st.integers(24, 40),
    st.floats(0.0, 0.3),
    st.floats(0.0, 2.5),
    st.floats(0.2, 0.5),
)
def test_cuts_inside_blocks_are_legal_and_leave_nothing_out(
    stage_rank: tuple[int, ...], layers: int, embedding: float, head: float, attention: float
) -> None:
    whole = spread_blocks(layers, stage_rank, embedding, head)
    cuts = spread_halves(
        layers, stage_rank, embedding=embedding, head=head, attention=attention, whole=whole
    )
    assert cuts[0] == 0
    assert cuts[-1] == layers + 2
    assert all(a < b and (b - a) % 0.5 == 0 for a, b in pairwise(cuts))
    assert cuts[1] >= 1
    assert cuts[-2] <= layers + 1
    ends = (embedding, head)
    assert largest_work(whole, stage_rank, ends, attention) == pytest.approx(
        max(work_of_ranks(whole, layers, stage_rank, ends))
    )


def test_cuts_inside_blocks_balance_the_head() -> None:
    ends, ranks = (0.01, 1.3), loop_placement(4, 6)
    whole = spread_blocks(40, ranks, *ends)
    cuts = spread_halves(40, ranks, embedding=ends[0], head=ends[1], attention=0.33, whole=whole)
    mean = (40 + sum(ends)) / 4
    assert largest_work(whole, ranks, ends, 0.33) > 1.06 * mean
    assert largest_work(cuts, ranks, ends, 0.33) < 1.01 * mean


def test_there_may_be_more_stages_than_blocks() -> None:
    cuts = spread_halves(6, loop_placement(4, 3), embedding=0.1, head=0.5, attention=0.4, whole=())
    assert len(cuts) == 13
    with pytest.raises(ValueError, match="15 stages for 12 half blocks"):
        spread_halves(6, loop_placement(5, 3), embedding=0.1, head=0.5, attention=0.4, whole=())


def cut(cuts: tuple[float, ...]) -> SizedPlan:
    knobs = ZeroppKnobs(pp=2, shard=32, chunks=1, recompute="none")
    return replace(ZEROPP.size(task(), knobs, 1), cuts=cuts)


def test_both_halves_of_a_block_cost_what_the_block_costs() -> None:
    """Time and bytes, wherever the cut between two stages is: only the places differ."""
    prices = {at: price_plan(cut((0, at, 48)), task().cluster) for at in (20, 20.5, 21)}
    for field in ("forward", "backward_input", "backward_weight"):
        totals = [sum(getattr(c, field) for c in p.stages) for p in prices.values()]
        assert totals == pytest.approx([totals[0]] * 3)
        first = [getattr(p.stages[0], field) for p in prices.values()]
        assert first[0] < first[1] < first[2]
    for field in ("parameters", "optimizer", "activations", "deferred", "unsharded"):
        totals = [sum(getattr(m, field) for m in p.memory) for p in prices.values()]
        assert totals == pytest.approx([totals[0]] * 3, rel=1e-6)
        first = [getattr(p.memory[0], field) for p in prices.values()]
        assert first[0] < first[1] < first[2]


def test_halves_are_not_recomputed() -> None:
    plan = cut((0, 20.5, 48))
    full = price_plan(replace(plan, recompute="full"), task().cluster).memory
    none = price_plan(plan, task().cluster).memory
    whole = price_plan(replace(cut((0, 20, 48)), recompute="full"), task().cluster).memory
    assert full[0].activations < none[0].activations
    assert full[0].activations - whole[0].activations > 5 * whole[0].activations / 20


def test_dropout_is_not_cut_inside() -> None:
    knobs = ZeroppKnobs(pp=2, shard=32, split_blocks=True)
    dropping = replace(task(), shape=replace(task().shape, dropout=0.1))
    with pytest.raises(InfeasibleError, match=r"dropout=0\.1 draws its masks block by block"):
        ZEROPP.size(dropping, knobs, 1)


def test_a_chunk_has_a_collective_per_flat_buffer() -> None:
    plan = cut((0, 20.5, 48))
    for stage in range(2):  # weights, all else, and the end that is tied
        sizes = collectives_of(plan, program_named("zeropp"), stage)
        assert len(sizes) == 3
        assert sum(sizes) == pytest.approx(stage_parameters(plan, stage))
        assert len(collectives_of(plan, program_named("fsdp"), stage)) == 21 + 7 * stage


def test_crossings_of_the_replicas_slow_the_compute_beside_them() -> None:
    knobs = ZeroppKnobs(pp=2, shard=8, replicate=4, chunks=4, recompute="none")
    result = ZEROPP.simulated(task(), Candidate(knobs, 1))
    assert min(result.price.replica_s) > 0
    free = replace(result.price, replica_s=(0.0,) * len(result.price.replica_s))
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
