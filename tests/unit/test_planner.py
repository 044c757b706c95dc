"""ZeroPP's planner: orders planned with the cluster's durations, and its knobs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baselines.zeropp.contender import ZEROPP, ZeroppKnobs
from tests.unit.simulated_task import cluster, task
from zeropp.choose.planner import fastest
from zeropp.choose.task import Candidate, Task
from zeropp.price import price_plan
from zeropp.price.programs import gathers
from zeropp.price.simulator import simulate
from zeropp.schedule import lower
from zeropp.schedule.build import build
from zeropp.schedule.plan import Plan
from zeropp.schedule.program import StageCost
from zeropp.schedule.zeropp_order import OrderSizes, planned_beginnings, planned_order
from zeropp.types.layout import InfeasibleError

SHAPE = replace(task().shape, layers=18)  # not divisible by P*V: unequal stages, a heavy head


def asked(
    preset: str = "a800", microbatches: int = 8, **knobs: object
) -> tuple[Task, Candidate[ZeroppKnobs]]:
    """64 GPUs in pipelines over groups of eight."""
    chosen = ZeroppKnobs(**{"shard": 8, "chunks": 1, **knobs})  # type: ignore[arg-type]
    assert isinstance(chosen.pp, int)
    return Task(
        shape=SHAPE,
        cluster=cluster(preset),
        num_gpus=64,
        global_batch=microbatches * 64 // chosen.pp,
    ), Candidate(chosen, 1)


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
        order, gather=gathers(plan), prefetch=plan.prefetch, reduce_every=plan.reduce_every
    )
    return plan.ordered(lowered)


@given(
    st.sampled_from(["a800", "h100"]),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(1, 2),
    st.integers(1, 12),
    st.integers(1, 8),
    st.sampled_from(["none", "full"]),
    st.sampled_from(["unit", "step"]),
)
def test_a_plan_is_never_slower_than_its_own_order_for_equal_durations(
    cluster: str, pp: int, chunks: int, m: int, unit: int, recompute: str, reduce_every: str
) -> None:
    what = asked(
        cluster, m, pp=pp, chunks=chunks, unit=unit, recompute=recompute, reduce_every=reduce_every
    )
    plan = ZEROPP.plan(*what)
    equal = equal_cost_plan(plan, plan.schedule.unit * chunks)
    price = price_plan(plan, what[0].cluster)
    steps = [simulate(p, what[0].cluster, price=price).step_s for p in (plan, equal)]
    assert steps[0] <= steps[1] * (1 + 1e-12)  # sums of the same durations, in another order


def test_unequal_stages_gain_from_their_real_durations() -> None:
    what = asked(microbatches=16, pp=8, chunks=2)
    plan = ZEROPP.plan(*what)
    steps = [simulate(p, what[0].cluster).step_s for p in (plan, equal_cost_plan(plan, 16))]
    assert steps[0] < 0.99 * steps[1]


def test_of_several_orders_the_fastest_that_fits_is_taken() -> None:
    given, candidate = asked(microbatches=16, pp=8, chunks=2, activation_cap=12)
    sized = ZEROPP.size(given, candidate.knobs, 1)
    price = price_plan(sized, given.cluster)
    plans = list(ZEROPP.plans(sized, price))
    steps = [simulate(plan, given.cluster, price=price) for plan in plans]
    quick = min(steps, key=lambda step: step.step_s)
    small = min(steps, key=lambda step: step.peak_bytes)
    assert quick.step_s < small.step_s
    assert small.peak_bytes < quick.peak_bytes
    device = given.cluster.device
    between = (small.peak_bytes + quick.peak_bytes) / 2 / 2**30 + device.reserved_gib
    tight = replace(given.cluster, device=replace(device, memory_gib=between))
    for orders in (plans, plans[::-1]):
        assert fastest(orders, given.cluster, price).step_s == quick.step_s
        assert fastest(orders, tight, price).step_s == small.step_s


@pytest.mark.parametrize(
    ("knobs", "words"), [({"activation_cap": 3}, "contender.activation_cap=3: a unit of 4")]
)
def test_what_cannot_be_is_refused_in_one_line(knobs: dict[str, Any], words: str) -> None:
    with pytest.raises(InfeasibleError, match=words) as error:
        ZEROPP.plan(*asked(pp=4, chunks=2, **knobs))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("cap", "many_actions"), [(10, 100_000), (12, 100)])
def test_a_planned_order_begins_like_one_of_its_beginnings(
    cap: int, many_actions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the second case the step counts as a long one, whose policy a few units decide."""
    monkeypatch.setattr("zeropp.schedule.zeropp_order._MANY_ACTIONS", many_actions)
    sizes = OrderSizes(num_ranks=4, chunks=2, num_microbatches=26, unit=4, activation_cap=cap)
    costs = tuple(StageCost(forward=1 + 0.05 * s, transfer=0.02) for s in range(8))
    whole = planned_order(sizes, costs).programs
    begun = [schedule.programs for schedule in planned_beginnings(sizes, costs)]
    assert len(begun) > 1
    for programs in begun:
        pairs = list(zip(programs, whole, strict=True))
        assert all(0 < len(part) < len(program) for part, program in pairs)
    assert any(
        all(part == program[: len(part)] for part, program in zip(programs, whole, strict=True))
        for programs in begun
    )
