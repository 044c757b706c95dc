"""ZeroPP's planner: orders planned with the cluster's durations, and its knobs."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.simulated_task import preset, task
from zeropp.cost import price_plan
from zeropp.cost.cluster import Cluster
from zeropp.plan import Plan, PlanRequest, Settings
from zeropp.planner import plan_zeropp
from zeropp.schedule import build, lower
from zeropp.sim.simulate import simulate
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
    )
    plan = plan_zeropp(
        PlanRequest(SHAPE, what.cluster, 64, 128, chosen.microbatch_size, "bf16", knobs)
    )
    result = simulate(plan, what.cluster)
    assert (result.step_s, result.peak_bytes) == (winner.step_s, winner.peak_bytes)
