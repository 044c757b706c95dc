"""The compute limit, and the losses against it that add up to the step."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

from baselines.deepspeed_3d.contender import DEEPSPEED, DeepSpeedKnobs
from benchmarks.report import charts
from benchmarks.report.charts import save
from benchmarks.specification.contenders import PRICED
from benchmarks.specification.reading import preset
from tests.unit.simulated_task import task
from zeropp.choose.contender import Contender
from zeropp.choose.space import SearchPoint, points
from zeropp.choose.task import Candidate
from zeropp.price import compute_limit
from zeropp.price.cluster import Cluster
from zeropp.types.layout import InfeasibleError
from zeropp.types.shape import ModelShape

SMALL = replace(
    task(16, 32),
    shape=replace(task().shape, layers=9, hidden=2048, heads=16, kv_heads=16, ffn=8192),
)


@cache
def points_of_all() -> list[tuple[Contender[Any], SearchPoint[Any], int]]:
    """Every contender with its degrees and microbatch sizes; it yields knobs for all."""
    found = [
        (contender, point, size)
        for contender in PRICED.values()
        for point, size in points(
            SMALL, contender.space, contender.knobs(), "auto", rejected=Counter()
        )
    ]
    assert len(found) > 100
    return found


@st.composite
def any_setting(draw: st.DrawFn) -> tuple[Contender[Any], Candidate[Any]]:
    """One of the tens of thousands of candidates; to list them all would take ten seconds."""
    contender, point, size = draw(st.sampled_from(points_of_all()))
    if not (families := list(contender.space.families(point))):
        reject()  # DeepSpeed 3D without tensor parallelism
    family = draw(st.sampled_from(families))
    try:
        plan = contender.size(SMALL, family, size)
        knobs = draw(st.sampled_from(list(contender.space.members(point.asked, family, plan))))
        contender.size(SMALL, knobs, size)
    except InfeasibleError:
        reject()
    return contender, Candidate(knobs, size)


@given(any_setting())
def test_losses_add_up_to_the_step_and_none_is_negative(
    setting: tuple[Contender[Any], Candidate[Any]],
) -> None:
    contender, candidate = setting
    result = contender.simulated(SMALL, candidate)
    losses = result.breakdown.by_kind()
    assert sum(losses.values()) == pytest.approx(result.step_s, rel=1e-9)
    assert result.breakdown.step_s == pytest.approx(result.step_s, rel=1e-9)
    assert losses["limit"] / result.step_s == pytest.approx(result.limit_share)
    assert result.limit_share < 1.0
    for kind, seconds in losses.items():
        assert kind == "small_kernels" or seconds >= -1e-9 * result.step_s, kind


def one(recompute: Literal["none", "full"] = "none") -> dict[str, float]:
    knobs = DeepSpeedKnobs(tp=1, pp=4, replicate=4, recompute=recompute)
    return DEEPSPEED.simulated(SMALL, Candidate(knobs, 1)).breakdown.by_kind()


def test_each_cause_is_found_where_it_is_and_nowhere_else() -> None:
    plain, again = one(), one(recompute="full")
    assert plain["recomputation"] == 0.0
    # Torch stops before a block's last product, which is a third of it.
    assert again["recomputation"] == pytest.approx(plain["limit"] / 3 * 2 / 3, rel=0.15)
    assert plain["tensor"] == 0.0
    assert plain["gathers"] > 0.0  # ZeRO-1 gathers what it has updated
    assert plain["transfers"] > 0.0  # DeepSpeed's block
    assert plain["imbalance"] > 0.0  # nine blocks on four ranks
    assert plain["bubble"] > 0.0
    assert plain["copies"] > 0.0  # gradients are added outside their product


@pytest.mark.parametrize(
    ("model", "cluster", "size", "tokens"),
    [("gpt_76b", "h100", 4, 1355), ("gpt_14_6b", "a800", 8, 2415), ("gpt_6_2b", "h100", 16, 15133)],
)
def test_limits_of_known_cells(model: str, cluster: str, size: int, tokens: float) -> None:
    shape, machine = preset("model", model, ModelShape), preset("cluster", cluster, Cluster)
    limit = compute_limit(shape, machine, 64, "bf16")
    assert limit.microbatch_size == size
    assert limit.tokens_per_s_per_gpu == pytest.approx(tokens, abs=1)


def test_a_model_that_no_device_holds_has_the_limit_of_one_sequence() -> None:
    shape = preset("model", "llama_405b", ModelShape)
    assert compute_limit(shape, task().cluster, 64, "bf16").microbatch_size == 1


def test_the_bars_add_up_to_the_step(tmp_path: Path) -> None:
    losses = {"3D": one(), "3D, recomputed": one(recompute="full")}
    picture = charts.time_breakdown({"cell": losses}, "losses", "words")
    (axis,) = picture.figure.axes
    lengths = [0.0, 0.0]
    for bars in axis.containers:
        for number, bar in enumerate(bars):
            lengths[number] += bar.get_width()
    lost = [kind for kind in losses["3D"] if any(kinds[kind] for kinds in losses.values())]
    assert len(axis.containers) == len(lost)
    assert [label.get_text() for label in axis.get_yticklabels()] == list(losses)  # fastest first
    for length, kinds in zip(lengths, losses.values(), strict=True):
        assert length == pytest.approx(sum(kinds.values()) / kinds["limit"])
    for path in save(picture, tmp_path).paths:
        assert path.stat().st_size > 1000
