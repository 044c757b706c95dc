"""The compute limit, and the losses against it that add up to the step."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.report import loss_split
from benchmarks.report.picture import save
from tests.unit.simulated_task import preset, task
from zeropp.cluster import Cluster
from zeropp.cost import compute_limit
from zeropp.shape import ModelShape
from zeropp.tune.search import result_of
from zeropp.tune.space import SPACES, Candidate, families, members

SMALL = replace(
    task(16, 32),
    shape=replace(task().shape, layers=9, hidden=2048, heads=16, kv_heads=16, ffn=8192),
)


@cache
def everything() -> list[Candidate]:
    found = [
        member
        for space in SPACES.values()
        for family in families(SMALL, space, Counter())
        for member in members(space, family)
    ]
    assert len(found) > 1000
    return found


@settings(max_examples=60, deadline=None)
@given(st.integers(0, len(everything()) - 1))
def test_losses_add_up_to_the_step_and_none_is_negative(number: int) -> None:
    result = result_of(SMALL, everything()[number])
    losses = result.losses.by_kind()
    assert sum(losses.values()) == pytest.approx(result.step_s, rel=1e-9)
    assert result.losses.step_s == pytest.approx(result.step_s, rel=1e-9)
    assert losses["limit"] / result.step_s == pytest.approx(result.limit_share)
    assert result.limit_share < 1.0
    for kind, seconds in losses.items():
        assert kind == "small_kernels" or seconds >= -1e-9 * result.step_s, kind


def one(**changes: object) -> dict[str, float]:
    layout = replace(everything()[0].layout, pp=4, tp=1, shard=1, replicate=4, chunks=1)
    plain = Candidate("deepspeed_3d", layout, 1, 8, "1f1b", "none")
    return result_of(SMALL, replace(plain, **changes)).losses.by_kind()  # type: ignore[arg-type]


def test_each_cause_is_found_where_it_is_and_nowhere_else() -> None:
    plain, again = one(), one(recompute="full")
    assert plain["recomputation"] == 0.0
    assert again["recomputation"] == pytest.approx(plain["limit"] / 3, rel=0.15)
    assert plain["tensor"] == plain["gathers"] == 0.0
    assert plain["transfers"] > 0.0  # DeepSpeed's block
    assert plain["imbalance"] > 0.0  # nine blocks on four ranks
    assert plain["bubble"] > 0.0
    assert plain["copies"] > 0.0  # gradients are added outside their product


@pytest.mark.parametrize(
    ("model", "cluster", "size", "tokens"),
    [("gpt_76b", "h100", 4, 1226), ("gpt_14_6b", "a800", 8, 2491), ("gpt_6_2b", "h100", 16, 13602)],
)
def test_limits_of_known_cells(model: str, cluster: str, size: int, tokens: float) -> None:
    shape, machine = preset("model", model, ModelShape), preset("cluster", cluster, Cluster)
    assert isinstance(shape, ModelShape)
    assert isinstance(machine, Cluster)
    limit = compute_limit(shape, machine, 64, "bf16")
    assert limit.microbatch_size == size
    assert limit.tokens_per_s_per_gpu == pytest.approx(tokens, abs=1)


def test_a_model_that_no_device_holds_has_the_limit_of_one_sequence() -> None:
    shape = preset("model", "llama_405b", ModelShape)
    assert isinstance(shape, ModelShape)
    assert compute_limit(shape, task().cluster, 64, "bf16").microbatch_size == 1


def test_the_bars_add_up_to_the_step(tmp_path: Path) -> None:
    losses = {"3D": one(), "3D, recomputed": one(recompute="full")}
    picture = loss_split.loss_split([loss_split.Cell("cell", losses)], "losses", "words")
    (axis,) = picture.figure.axes
    heights = [0.0, 0.0]
    for bars in axis.containers:
        for number, bar in enumerate(bars):
            heights[number] += bar.get_height()
    assert len(axis.containers) == len(losses["3D"])
    for height, kinds in zip(heights, losses.values(), strict=True):
        assert height == pytest.approx(sum(kinds.values()) / kinds["limit"])
    for path in save(picture, tmp_path).paths:
        assert path.stat().st_size > 1000
