"""The simulator against what can be said of a step without it."""

from __future__ import annotations

import csv
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from baselines.deepspeed_3d.contender import DEEPSPEED, DeepSpeedKnobs
from baselines.zeropp.contender import ZEROPP, ZeroppKnobs
from benchmarks.specification.contenders import PRICED
from tests.unit.simulated_task import cluster, model, task
from zeropp.choose.task import Candidate, Task
from zeropp.price import PlanPrice, StageExtras, StageMemory, price_plan
from zeropp.price.peak_memory import as_memory, walk
from zeropp.price.simulator import simulate
from zeropp.schedule import lower
from zeropp.schedule.build import build
from zeropp.schedule.plan import Plan, SizedPlan
from zeropp.schedule.program import StageCost, for_torch
from zeropp.types.layout import Layout


def flat_price(plan: Plan, cost: StageCost, **changes: object) -> PlanPrice:
    """Equal stages: 10 bytes of parameters each, 3 of activations, no temporaries."""
    stages = plan.schedule.num_stages
    sizes = {"parameters": 10, "optimizer": 20, "gradients": 10, "unsharded": 5}
    sizes |= {"unsharded_gradients": 7, "reduction_step": 7, "reduction_copy": 7, "deferred": 2}
    sizes |= dict.fromkeys(("activations", "forward", "backward_input", "full_backward"), 3)
    memory = StageMemory(**dict.fromkeys(StageMemory.__dataclass_fields__, 0) | sizes)
    price = PlanPrice(
        stages=(cost,) * stages,
        extras=(StageExtras(),) * stages,
        memory=(memory,) * stages,
        limit_s=1.0,
    )
    return replace(price, **changes)  # type: ignore[arg-type]


def one_f_one_b(pp: int, m: int) -> Plan:
    knobs = DeepSpeedKnobs(tp=1, pp=pp, replicate=64 // pp)
    return DEEPSPEED.plan(task(64, m * 64 // pp), Candidate(knobs, 1))


def zeropp_plan(pp: int, m: int, unit: int, **knobs: object) -> Plan:
    """Two chunks per rank on 64 GPUs, with a cap of all chunk-activations of a unit."""
    chosen = ZeroppKnobs(pp=pp, shard=64 // pp, chunks=2, unit=unit, **knobs)  # type: ignore[arg-type]
    return ZEROPP.plan(task(64, m * 64 // pp), Candidate(chosen, 1))


def test_a_rank_whose_layers_cost_nothing_has_a_price() -> None:
    """A stage of views alone, beside collectives that slow compute."""
    plan = zeropp_plan(2, 4, 2)
    price = flat_price(plan, StageCost(unshard=0.1), overlap_slowdown=0.5)
    free = StageCost(forward=0.0, backward_input=0.0, backward_weight=0.0, unshard=0.1)
    stages = tuple(
        free if rank == 0 else cost
        for rank, cost in zip(plan.schedule.stage_rank, price.stages, strict=True)
    )
    step_s = simulate(plan, task().cluster, price=replace(price, stages=stages)).step_s
    assert 2 * 4 * 3.0 <= step_s < simulate(plan, task().cluster, price=price).step_s


def test_collectives_that_wait_slow_no_compute() -> None:
    """Hidden gathers that move bytes make a step longer, and those that only wait do not."""
    plan = zeropp_plan(2, 4, 2)
    price = flat_price(plan, StageCost(unshard=0.1, reduce_grad=0.1), overlap_slowdown=0.5)
    extras = (StageExtras(waits=0.1),) * len(price.stages)
    waiting = replace(price, extras=extras)
    unslowed = replace(price, overlap_slowdown=0.0)
    steps = [simulate(plan, task().cluster, price=p).step_s for p in (price, waiting, unslowed)]
    assert steps[0] > steps[1] == pytest.approx(steps[2])


def test_what_follows_the_last_microbatch_is_added() -> None:
    plan = one_f_one_b(4, 8)
    price = flat_price(
        plan,
        StageCost(
            forward=1.0,
            backward_input=1.0,
            backward_weight=1.0,
            reduce_replicas=0.5,
            reduce_tied=0.0625,
            update=0.25,
            gather_updated=0.125,
        ),
    )
    result = simulate(plan, task().cluster, price=price)
    assert result.step_s == pytest.approx(33.0 + 0.5 + 0.0625 + 0.25 + 0.125)
    kinds = result.breakdown.by_kind()
    expected = {"reductions": 0.5, "optimizer": 0.25 + 0.0625, "gathers": 0.125, "bubble": 9.0}
    assert {kind: kinds[kind] for kind in expected} == pytest.approx(expected)
    assert result.timeline().step_s == pytest.approx(result.step_s)


def test_collectives_beside_compute_slow_it() -> None:
    plan = zeropp_plan(2, 8, 2)
    cost = StageCost(forward=1.0, backward_input=1.0, backward_weight=1.0, unshard=0.01)
    plain = simulate(plan, task().cluster, price=flat_price(plan, cost))
    slowed = simulate(plan, task().cluster, price=flat_price(plan, cost, overlap_slowdown=0.5))
    gathers = sum(str(a).endswith("UNSHARD") for a in plan.schedule.programs[0]) / 2
    share = gathers * 0.01 / (8 * 2 * 3.0)  # RESHARD ends in SHARD too, hence the half
    assert slowed.step_s == pytest.approx(plain.step_s * (1 + 0.5 * share), rel=2e-3)
    assert slowed.step_s > plain.step_s


def test_memory_peak_counts_what_1f1b_keeps() -> None:
    plan = one_f_one_b(4, 8)
    price = flat_price(plan, StageCost())
    memory = replace(price.memory[0], unsharded=0, reduction_step=0, reduction_copy=0)
    result = simulate(plan, task().cluster, price=replace(price, memory=(memory,) * 4))
    # Rank r keeps P - r microbatches; at a backward the unsharded gradient (7) lives too.
    totals = [memory.total for memory in result.memory]
    assert totals == [40 + (4 - rank) * 3 + 7 for rank in range(4)]
    assert result.peak_bytes == totals[0]


@pytest.mark.parametrize("pp", [2, 4])
def test_memory_curve_ends_where_it_began_and_peaks_at_the_peak(pp: int) -> None:
    plan = zeropp_plan(pp, 8, pp)
    result = simulate(plan, task().cluster, price=flat_price(plan, StageCost(unshard=0.1)))
    for rank, peak in enumerate(result.memory):
        changes = walk(result.plan, result.price, rank)
        curve = [as_memory(result.plan, result.price, rank, change) for change in changes]
        assert max(memory.total for memory in curve) == peak.total
        last = curve[-1]
        assert (last.activations, last.unsharded) == (0, 0)
        assert (last.gradients, last.workspace) == (2 * 10, 7)  # the last reduction's copy


def test_a_step_without_its_end_has_no_price() -> None:
    plan = zeropp_plan(2, 8, 2)
    first, second = plan.schedule.programs
    for programs in [(for_torch(first), second), (first, for_torch(second))]:
        passes = replace(plan.schedule, programs=programs)
        with pytest.raises(ValueError, match="end without an update"):
            simulate(replace(plan, schedule=passes), task().cluster)


def calls_to_simulate(microbatches: int) -> tuple[int, int]:
    """Python calls that a step of 8 ranks with 4 chunks each takes, and its number of actions."""
    schedule = build("zeropp", num_ranks=8, chunks=4, num_microbatches=microbatches)
    lowered = lower(schedule, gather=True)
    plan = SizedPlan(
        contender="zeropp",
        shape=task().shape,
        layout=Layout(pp=8, chunks=4, shard=8),
        microbatch_size=1,
        schedule=lowered,
        cuts=tuple(range(33)),
        program="zeropp",
    ).ordered(lowered)
    price = flat_price(plan, StageCost(transfer=0.05, unshard=0.5, reduce_grad=0.5))
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        del frame, argument
        calls += event == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        step_s = simulate(plan, task().cluster, price=price).step_s
    finally:
        sys.setprofile(before)
    assert step_s > microbatches * 4 * 3.0
    return calls, sum(map(len, lowered.programs))


def test_work_of_a_simulated_step_grows_with_its_actions_alone() -> None:
    few_calls, few = calls_to_simulate(16)
    many_calls, many = calls_to_simulate(64)
    assert many > 3 * few > 3 * 8 * 4 * 3 * 16  # F, I and W of every chunk and microbatch at least
    assert many_calls / many < 1.05 * few_calls / few < 12


PINNED = Path(__file__).parents[1] / "golden" / "simulated_plans.csv"
with PINNED.open() as file:
    ROWS = list(csv.DictReader(file))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['contender']} {row['step_s']}")
def test_a_simulated_step_is_what_it_was(row: dict[str, str]) -> None:
    """Plans of all contenders, drawn at random, most of them with replicas. A change of the price
    model writes their numbers anew; a change of how they are found does not."""
    contender = PRICED[row["contender"]]
    words = (word.partition("=") for word in row["knobs"].split())
    knobs = {key: json.loads(value) for key, _, value in words}
    given = Task(
        shape=model(row["model"]),
        cluster=cluster(row["cluster"]),
        num_gpus=int(row["num_gpus"]),
        global_batch=int(row["global_batch"]),
    )
    candidate = Candidate(contender.knobs(**knobs), int(row["microbatch_size"]))
    result = contender.simulated(given, candidate)
    assert result.step_s == pytest.approx(float(row["step_s"]), rel=1e-9)
    assert result.peak_bytes == int(row["peak_bytes"])
    kinds = result.breakdown.by_kind()
    for kind in ("bubble", "reductions", "gathers", "optimizer"):
        assert kinds[kind] == pytest.approx(float(row[kind]), abs=1e-9 * result.step_s)


def test_price_depends_on_units_only_by_what_is_added_later() -> None:
    plans = [zeropp_plan(4, 16, unit, reduce_every="step") for unit in (4, 8, 16)]
    once = [price_plan(plan, task().cluster) for plan in plans]
    assert once[0] == once[1] == once[2]  # the tuner prices a family once
    plans = [zeropp_plan(4, 16, unit, reduce_every="unit") for unit in (4, 8, 16)]
    later = [price_plan(plan, task().cluster) for plan in plans]
    assert later[0] == later[1] != later[2] == once[2]
    assert later[0].stages[0].reduce_grad > once[0].stages[0].reduce_grad
