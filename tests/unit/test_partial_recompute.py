"""Partial recomputation: time and memory lie between none and full, in equal steps per block."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from baselines.deepspeed_3d.contender import DEEPSPEED, DeepSpeedKnobs
from baselines.zeropp.contender import ZEROPP, ZeroppKnobs
from tests.unit.simulated_task import task
from zeropp.choose.contender import describe
from zeropp.choose.task import Candidate
from zeropp.price import price_plan
from zeropp.price.simulator import simulate
from zeropp.schedule.plan import SizedPlan
from zeropp.schedule.program import loop_placement, unordered
from zeropp.types.layout import Layout
from zeropp.types.literals import Auto


def sized(program: str, recompute: str, recomputed: tuple[int, ...]) -> SizedPlan:
    layout = Layout(pp=4, shard=16)
    plan = SizedPlan(
        contender=program,
        shape=task().shape,
        layout=layout,
        microbatch_size=1,
        schedule=unordered("1f1b", loop_placement(4, 1), 8),
        cuts=(0, 11, 21, 31, 42),
        program=program,
        precision="bf16",
    )
    return replace(plan, recompute=recompute, recomputed=recomputed)  # type: ignore[arg-type]


@pytest.mark.parametrize("program", ["zeropp", "torch_pp", "deepspeed_3d", "best_public_3d"])
def test_each_recomputed_block_costs_the_same_time_and_saves_the_same_memory(program: str) -> None:
    def price(recompute: str, *recomputed: int) -> tuple[float, int, int, int]:
        priced = price_plan(sized(program, recompute, recomputed), task().cluster)
        memory = priced.memory[1]
        moments = (memory.forward, memory.backward_input)
        return (priced.stages[1].backward_input, memory.activations, *moments)

    none, full = price("none"), price("full")
    found = [price("full", *([n] * 4)) for n in range(11)]
    assert found[0] == pytest.approx(none, rel=1e-6)
    assert found[10] == pytest.approx(full, rel=1e-6)
    for n, (seconds, activations, *_) in enumerate(found):
        assert seconds == pytest.approx(none[0] + n / 10 * (full[0] - none[0]), rel=1e-6)
        assert activations == pytest.approx(none[1] + n / 10 * (full[1] - none[1]), rel=1e-6)
    for before, after in pairwise(found[1:]):
        assert after[2] <= before[2] + 1  # bytes, rounded down
    assert full[0] > none[0]
    assert full[1] < none[1]


def test_the_loss_of_recomputation_is_that_of_its_blocks() -> None:
    knobs = DeepSpeedKnobs(pp=4, replicate=16, recompute="full")
    result = DEEPSPEED.simulated(task(64, 128), Candidate(knobs, 1))
    blocks = [result.plan.blocks[stage] for stage in range(4)]
    half = replace(result.plan, recomputed=tuple(count // 2 for count in blocks))
    lost = simulate(half, task().cluster).breakdown.recomputation
    share = sum(count // 2 for count in blocks) / sum(blocks)
    assert lost == pytest.approx(share * result.breakdown.recomputation)
    assert simulate(half, task().cluster).peak_bytes > 0


def test_zeropp_recomputes_the_first_blocks_of_every_rank() -> None:
    """With one block per chunk it is not all or nothing."""

    def recomputed(blocks: int | Auto, **knobs: Any) -> tuple[int, ...]:
        mine = ZeroppKnobs(pp=2, shard=32, recompute="full", recompute_blocks=blocks, **knobs)
        return ZEROPP.size(task(64, 128), mine, 1).recomputed_per_stage

    assert recomputed(7, chunks=20) == (1,) * 14 + (0,) * 26
    assert sum(recomputed("auto", chunks=20)) == task().shape.layers
    assert recomputed(30, chunks=1) == recomputed("auto", chunks=1)  # all that a rank has
    of_two = ZEROPP.size(
        task(64, 128),
        ZeroppKnobs(pp=2, shard=32, chunks=2, recompute="full", recompute_blocks=13),
        1,
    )
    assert of_two.recomputed_per_stage == (
        of_two.blocks[0],
        of_two.blocks[1],
        *[13 - blocks for blocks in of_two.blocks[:2]],
    )
    assert "of 13 blocks per rank" in describe(of_two)
