"""ZeroPP's planner: orders planned with the cluster's durations, and its knobs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.simulated_task import preset, task
from zeropp.cluster import Cluster
from zeropp.cost import price_plan
from zeropp.layout import InfeasibleError
from zeropp.plan import Plan, PlanRequest, Settings
from zeropp.planner.zeropp_plan import plan_zeropp
from zeropp.schedule import build, lower
from zeropp.schedule.action import Op
from zeropp.sim.simulator import simulate
from zeropp.tune.search import search
from zeropp.tune.space import SPACES

SHAPE = replace(task().shape, layers=18)  # not divisible by P*V: unequal stages, a heavy head


def request(cluster: str = "a800", microbatches: int = 8, **knobs: object) -> PlanRequest:
    """64 GPUs in pipelines over groups of eight."""
    named = preset("cluster", cluster, Cluster)
    assert isinstance(named, Cluster)
    chosen = Settings("zeropp", **{"shard": 8, **knobs})  # type: ignore[arg-type]
    assert isinstance(chosen.pp, int)
    batch = microbatches * 64 // chosen.pp
    return PlanRequest(SHAPE, named, 64, batch, 1, "bf16", chosen)


def equal_cost_plan(plan: Plan, cap: int) -> Plan:
    """The same plan in the order for equal durations."""
    order = build(
        "zeropp",
        num_ranks=plan.layout.pp,
        chunks=plan.layout.chunks,
        num_microbatches=plan.num_microbatches,
        unit=plan.schedule.unit,
        activation_cap=cap,
    )
    lowered = lower(
        order, gather=plan.gathers, prefetch=plan.prefetch, reduce_every=plan.reduce_every
    )
    return replace(plan, schedule=lowered)


@given(
    st.sampled_from(["a800", "h100"]),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(1, 2),
    st.integers(1, 12),
    st.integers(1, 8),
    st.sampled_from(["none", "full"]),
    st.sampled_from(["unit", "step"]),
)
@settings(max_examples=30, deadline=None)
def test_a_plan_is_never_slower_than_its_own_order_for_equal_durations(
    cluster: str, pp: int, chunks: int, m: int, unit: int, recompute: str, reduce_every: str
) -> None:
    asked = request(
        cluster, m, pp=pp, chunks=chunks, unit=unit, recompute=recompute, reduce_every=reduce_every
    )
    plan = plan_zeropp(asked)
    equal = equal_cost_plan(plan, plan.schedule.unit * chunks)
    price = price_plan(plan, asked.cluster)
    steps = [simulate(p, asked.cluster, price=price).step_s for p in (plan, equal)]
    assert steps[0] <= steps[1]


def test_unequal_stages_gain_from_their_real_durations() -> None:
    asked = request(microbatches=16, pp=8, chunks=2)
    plan = plan_zeropp(asked)
    steps = [simulate(p, asked.cluster).step_s for p in (plan, equal_cost_plan(plan, 16))]
    assert steps[0] < 0.99 * steps[1]


def test_the_tuner_prices_the_plan_that_the_planner_gives() -> None:
    what = replace(task(64, 128), shape=SHAPE)
    winner = search(what, SPACES["zeropp"], tolerance=0.05).winner
    assert winner is not None
    chosen, layout = winner.candidate, winner.candidate.layout
    knobs = Settings(
        "zeropp",
        pp=layout.pp,
        shard=layout.shard,
        replicate=layout.replicate,
        replicate_zero=layout.replicate_zero,
        chunks=layout.chunks,
        unit=chosen.unit,
        activation_cap=chosen.cap,
        recompute=chosen.recompute,
        reduce_every=chosen.reduce_every,
        placement=layout.placement,
        stage_style=chosen.stage_style,
    )
    plan = plan_zeropp(
        PlanRequest(SHAPE, what.cluster, 64, 128, chosen.microbatch_size, "bf16", knobs)
    )
    result = simulate(plan, what.cluster)
    assert (result.step_s, result.peak_bytes) == (winner.step_s, winner.peak_bytes)


def test_kept_chunks_save_gathers_and_cost_memory() -> None:
    plans = [plan_zeropp(request(microbatches=16, pp=4, chunks=2, keep=k)) for k in (0, 2)]
    gathers = [sum(a.op is Op.UNSHARD for a in plan.schedule.programs[0]) for plan in plans]
    assert gathers[1] == 2 < gathers[0]
    memory = [simulate(plan, request(pp=4).cluster).memory[0] for plan in plans]
    assert memory[1].unsharded >= memory[0].unsharded
    assert plans[1].keep == 2


def test_a_cap_in_gib_holds_as_many_of_the_largest_chunk() -> None:
    asked = request(microbatches=16, pp=4, chunks=2)
    largest = max(m.activations for m in price_plan(plan_zeropp(asked), asked.cluster).memory)
    by_size = request(
        microbatches=16, pp=4, chunks=2, unit=8, activation_cap_gib=12.5 * largest / 2**30
    )
    by_number = request(microbatches=16, pp=4, chunks=2, unit=8, activation_cap=12)
    assert plan_zeropp(by_size) == plan_zeropp(by_number)


@given(
    st.sampled_from([1, 2, 4, 8]),
    st.integers(1, 2),
    st.integers(1, 12),
    st.integers(1, 8),
    st.sampled_from(["none", "selective", "full"]),
)
@settings(max_examples=30, deadline=None)
def test_a_suggested_cap_in_gib_is_accepted(
    pp: int, chunks: int, microbatches: int, unit: int, recompute: str
) -> None:
    knobs = {"pp": pp, "chunks": chunks, "unit": unit, "recompute": recompute}
    with pytest.raises(InfeasibleError, match=r"use [\d.]+ or more") as refusal:
        plan_zeropp(request(microbatches=microbatches, activation_cap_gib=1e-6, **knobs))
    suggested = float(str(refusal.value).split("(use ")[1].split()[0])
    plan_zeropp(request(microbatches=microbatches, activation_cap_gib=suggested, **knobs))


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"activation_cap_gib": 0.5}, "contender.activation_cap_gib=0.5: holds"),
        ({"activation_cap_gib": 30.0, "activation_cap": 8}, "contender.activation_cap_gib=30.0"),
        ({"activation_cap": 3}, "contender.activation_cap=3: a unit of 4"),
        ({"keep": -1}, "contender.keep=-1"),
        ({"tp": 2}, "contender.tp=2"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(knobs: dict[str, object], words: str) -> None:
    with pytest.raises(InfeasibleError, match=words) as error:
        plan_zeropp(request(pp=4, chunks=2, **knobs))
    assert "\n" not in str(error.value)


def test_replicas_crossed_once_a_unit_split_the_gradients_under_zero1() -> None:
    knobs = {"pp": 4, "chunks": 2, "shard": 8, "replicate_zero": 1, "microbatches": 16}
    plans = [
        plan_zeropp(request(**knobs, replicate_every=every))  # type: ignore[arg-type]
        for every in ("step", "unit")
    ]
    once, often = (simulate(plan, request(pp=4).cluster) for plan in plans)
    assert often.memory[0].gradients < once.memory[0].gradients
    assert often.step_s >= once.step_s  # the same last crossing, and more before it
