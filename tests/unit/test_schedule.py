"""Schedules: every generator over random sizes, caps and costs, and the passes over them."""

from __future__ import annotations

import csv
import io
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.unbuffered_run import UnbufferedRun
from zeropp.schedule import ScheduleError, lower, validate
from zeropp.schedule.build import GENERATORS, build
from zeropp.schedule.event_loop import run
from zeropp.schedule.legality import live_activations
from zeropp.schedule.passes import with_step_end
from zeropp.schedule.program import (
    Action,
    Op,
    Schedule,
    StageCost,
    StepEnd,
    for_torch,
    merged_weights,
    parse_action,
)
from zeropp.schedule.zeropp_order import smallest_cap

GOLDEN = Path(__file__).parents[1] / "golden"
GROUPED = ("interleaved_1f1b", "interleaved_zb")
duration = st.floats(0.1, 4.0)


@st.composite
def zeropp_sizes(draw: st.DrawFn) -> dict[str, int]:
    ranks, chunks = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    m = draw(st.integers(1, 12))
    unit, merged = draw(st.integers(1, m)), draw(st.integers(1, 4))
    cap = draw(st.integers(smallest_cap(chunks, m, unit, merged), unit * chunks + 2))
    return {
        "num_ranks": ranks,
        "chunks": chunks,
        "num_microbatches": m,
        "unit": unit,
        "activation_cap": cap,
        "merged": merged,
    }


@st.composite
def any_zeropp(draw: st.DrawFn) -> dict[str, Any]:
    """Sizes with and without a split backward."""
    sizes: dict[str, Any] = draw(zeropp_sizes())
    return sizes | {"split_backward": draw(st.booleans())}


@st.composite
def any_schedule(draw: st.DrawFn) -> Schedule:
    name = draw(st.sampled_from(GENERATORS))
    if name == "zeropp":
        return build(name, **draw(any_zeropp()))
    ranks, m = draw(st.integers(1, 5)), draw(st.integers(1, 10))
    chunks = draw(st.integers(1, 3)) if name in (*GROUPED, "looped_bfs") else 1
    chunks = 2 if name == "zbv" else chunks
    if name not in GROUPED:
        return build(name, num_ranks=ranks, chunks=chunks, num_microbatches=m)
    rounds = draw(st.integers(1, 3))
    group = draw(st.integers(1 if rounds == 1 else ranks, 2 * ranks))
    sizes: dict[str, Any] = {"num_ranks": ranks, "chunks": chunks}
    sizes["num_microbatches"] = rounds * group
    return build(name, **sizes, group=group)


@st.composite
def costs_of(draw: st.DrawFn, stages: int) -> list[StageCost]:
    compute = ("forward", "backward_input", "backward_weight")
    beside = ("unshard", "reduce_grad", "transfer")

    def drawn() -> dict[str, Any]:
        durations = {name: draw(duration) for name in compute}
        return durations | {name: draw(duration) / 4 for name in beside}

    return [StageCost(**drawn()) for _ in range(stages)]


@given(any_schedule())
def test_every_generator_is_legal(schedule: Schedule) -> None:
    validate(schedule)
    seen = Counter(
        (action.stage, part, action.microbatch)
        for program in schedule.programs
        for action in program
        for part in ("IW" if action.op is Op.FULL_BACKWARD else str(action.op))
    )
    assert set(seen.values()) == {1}
    assert len(seen) == 3 * schedule.num_stages * schedule.num_microbatches


@given(any_zeropp(), st.data())
def test_zeropp_keeps_the_cap_and_beats_its_equal_cost_order(
    sizes: dict[str, Any], data: st.DataObject
) -> None:
    costs = data.draw(costs_of(sizes["num_ranks"] * sizes["chunks"]))
    equal = build("zeropp", **sizes)
    planned = build("zeropp", **sizes, costs=costs)
    for schedule in (equal, planned):
        validate(schedule, activation_cap=sizes["activation_cap"])
    priced = [run(lower(s, gather=True), costs).step_s for s in (planned, equal)]
    assert priced[0] <= priced[1]


@given(any_zeropp())
def test_the_backward_is_split_or_not(sizes: dict[str, Any]) -> None:
    ops = {a.op for program in build("zeropp", **sizes).programs for a in program}
    parts = {Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT}
    split = sizes["split_backward"] or sizes["merged"] > 1
    assert ops == {Op.FORWARD} | (parts if split else {Op.FULL_BACKWARD})


@given(any_zeropp())
def test_weight_gradients_of_a_stage_come_in_groups_within_units(sizes: dict[str, Any]) -> None:
    m, unit, merged = sizes["num_microbatches"], sizes["unit"], sizes["merged"]
    units = [min(unit, m - first) for first in range(0, m, unit)]
    expected = (
        sorted(min(merged, size - first) for size in units for first in range(0, size, merged))
        * sizes["chunks"]
    )
    for program in lower(build("zeropp", **sizes), gather=True).programs:
        groups = [group for group in merged_weights(program, merged).values() if group]
        assert all(j // unit == group[0] // unit for group in groups for j in group)
        if sizes["split_backward"] or merged > 1:
            assert sorted(map(len, groups)) == sorted(expected)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 16])
@pytest.mark.parametrize("chunks", [1, 2, 4])
@pytest.mark.parametrize("units", [1, 2, 5])
def test_zeropp_meets_its_bound_within_1f1b_memory(ranks: int, chunks: int, units: int) -> None:
    m = ranks * units
    schedule = build("zeropp", num_ranks=ranks, chunks=chunks, num_microbatches=m, unit=ranks)
    result = run(schedule, [StageCost()] * schedule.num_stages)
    assert result.over_ideal <= 1 + (ranks - 1) / (3 * m * chunks) + 1e-9
    assert max(max(live_activations(schedule, r)) for r in range(ranks)) <= ranks * chunks


@given(st.data())
def test_zeropp_meets_its_bound_with_a_short_unit(data: st.DataObject) -> None:
    ranks, chunks = data.draw(st.integers(1, 8)), data.draw(st.integers(1, 4))
    unit = data.draw(st.integers(ranks, 2 * ranks))
    m = unit * data.draw(st.integers(1, 3)) + data.draw(st.integers(0, unit - 1))
    schedule = build("zeropp", num_ranks=ranks, chunks=chunks, num_microbatches=m, unit=unit)
    result = run(schedule, [StageCost()] * schedule.num_stages)
    assert result.step_s <= 3 * m * chunks + ranks - 1
    cap = unit * chunks
    assert max(max(live_activations(schedule, r)) for r in range(ranks)) <= cap


@given(zeropp_sizes(), st.data())
def test_weight_gradients_of_one_chunk_at_a_time_are_open(
    sizes: dict[str, Any], data: st.DataObject
) -> None:
    costs = data.draw(costs_of(sizes["num_ranks"] * sizes["chunks"]))
    for order in (build("zeropp", **sizes), build("zeropp", **sizes, costs=costs)):
        for program in lower(order, gather=True).programs:
            unreduced: set[int] = set()
            for action in program:
                if action.op is Op.BACKWARD_WEIGHT:
                    unreduced.add(action.stage)
                elif action.op is Op.REDUCE_GRAD:
                    unreduced.remove(action.stage)
                assert len(unreduced) <= 1


@given(any_schedule(), st.integers(0, 3), st.sampled_from(["unit", "step"]))
def test_lowered_programs_gather_and_reduce_once(
    schedule: Schedule, prefetch: int, reduce_every: str
) -> None:
    lowered = lower(
        schedule,
        gather=True,
        prefetch=prefetch,
        reduce_every="unit" if reduce_every == "unit" else "step",
    )
    validate(lowered)
    counts = Counter((a.stage, a.op) for program in lowered.programs for a in program)
    units = -(-schedule.num_microbatches // schedule.unit)
    for stage in range(schedule.num_stages):
        assert counts[stage, Op.UNSHARD] == counts[stage, Op.RESHARD]
        assert 1 <= counts[stage, Op.UNSHARD] <= 2 * units
        assert counts[stage, Op.REDUCE_GRAD] == (units if reduce_every == "unit" else 1)
    compute = tuple(tuple(a for a in p if a.op.is_compute) for p in lowered.programs)
    assert compute == schedule.programs


def test_text_and_csv_round_trip() -> None:
    schedule = lower(
        build("zeropp", num_ranks=3, chunks=2, num_microbatches=7, unit=3), gather=True
    )
    rows = csv.reader(io.StringIO(schedule.to_csv()))
    assert tuple(tuple(map(parse_action, row)) for row in rows) == schedule.programs


@given(st.integers(0, 999), st.sampled_from(Op), st.integers(0, 999))
def test_action_round_trips(stage: int, op: Op, microbatch: int) -> None:
    action = Action(stage, op, microbatch if op.has_microbatch else None)
    assert parse_action(str(action)) == action


@pytest.mark.parametrize("text", ["0F", "0UNSHARD3", "F3", "0X1", "0SEND1", ""])
def test_what_is_no_action_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not an action"):
        parse_action(text)


@given(any_schedule())
def test_no_deadlock_even_if_a_send_blocks_until_its_receive_is_posted(schedule: Schedule) -> None:
    """No buffers at all. Each rank's next step is enabled or not whatever the others' speed, and
    stays enabled once it is, so one run without deadlock proves it for any timing."""
    assert UnbufferedRun(lower(schedule, gather=True)).stuck() == []


def _needed_before(compute: Schedule) -> dict[tuple[int, bool, int | None], list[int]]:
    """How many compute actions of every rank must have run for an output: (stage, is it a forward,
    microbatch)."""
    done: dict[tuple[int, bool, int | None], list[int]] = {}
    ranks = [[0] * compute.num_ranks for _ in range(compute.num_ranks)]
    for stage, op, j in compute.sequence.actions:
        mine = ranks[compute.stage_rank[stage]]
        if op is Op.FORWARD:
            source = (stage - 1, True, j)
        else:
            is_last = stage == compute.num_stages - 1
            source = (stage, True, j) if is_last else (stage + 1, False, j)
        mine[:] = map(max, mine, done.get(source, mine))
        mine[compute.stage_rank[stage]] += 1
        if op is not Op.BACKWARD_WEIGHT:
            done[stage, op is Op.FORWARD, j] = list(mine)
    return done


@given(any_schedule())
def test_a_receive_is_posted_after_all_that_its_message_depends_on(schedule: Schedule) -> None:
    """Otherwise a rank whose host waits for its device, at any place, may wait for ever."""
    needed = _needed_before(schedule)
    for rank, program in enumerate(lower(schedule, gather=True).programs):
        issued = 0
        for stage, op, j in program:
            issued += op.is_compute
            if op in (Op.RECV_F, Op.RECV_B):
                is_forward = op is Op.RECV_F
                source = stage - 1 if is_forward else stage + 1
                assert issued >= needed[source, is_forward, j][rank]


@pytest.mark.parametrize("name", GENERATORS)
def test_golden(name: str) -> None:
    chunks = 2 if name in (*GROUPED, "looped_bfs", "zbv", "zeropp") else 1
    schedule = build(name, num_ranks=4, chunks=chunks, num_microbatches=8)
    assert schedule.to_csv() == (GOLDEN / f"schedule_{name}.csv").read_text()
    if name == "zeropp":
        lowered = lower(schedule, gather=True)
        assert lowered.to_csv() == (GOLDEN / "schedule_zeropp_lowered.csv").read_text()


ENDS = [
    (StepEnd(), ["0UPDATE"], ["1UPDATE"]),
    (StepEnd(tied=(0, 3)), ["0REDUCE_TIED 0UPDATE"], ["3REDUCE_TIED 1UPDATE"]),
    (StepEnd(tied=(0, 2)), ["0REDUCE_TIED 0UPDATE"], ["1UPDATE"]),
    (
        StepEnd(over_replicas=True, gathers_updated=True),
        ["2REDUCE_GRAD 2REDUCE_REPLICAS", "0REDUCE_GRAD 0REDUCE_REPLICAS 0UPDATE 0GATHER_UPDATED"],
        ["3REDUCE_GRAD 3REDUCE_REPLICAS", "1REDUCE_GRAD 1REDUCE_REPLICAS 1UPDATE 1GATHER_UPDATED"],
    ),
    (
        StepEnd(tied=(0, 3), gathers_updated=True, gathers_whole=True),
        ["0REDUCE_TIED 0GATHER_WHOLE 0UPDATE 0GATHER_UPDATED"],
        ["3REDUCE_TIED 1GATHER_WHOLE 1UPDATE 1GATHER_UPDATED"],
    ),
]


@pytest.mark.parametrize(("end", "first", "second"), ENDS, ids=str)
def test_a_step_ends_with_what_its_plan_asks_for(
    end: StepEnd, first: list[str], second: list[str]
) -> None:
    lowered = lower(build("zeropp", num_ranks=2, chunks=2, num_microbatches=4), gather=True)
    whole = with_step_end(lowered, end)
    validate(whole)
    for program, parts in zip(whole.programs, (first, second), strict=True):
        text = " ".join(map(str, program))
        assert text.endswith(parts[-1])
        assert all(part in text for part in parts)
    assert with_step_end(lowered, end) is whole  # its order in time is found once


@given(any_schedule(), st.booleans(), st.booleans(), st.booleans(), st.booleans())
def test_the_end_of_a_step_adds_to_its_passes_alone(
    compute: Schedule, tied: bool, replicas: bool, zero1: bool, parts: bool
) -> None:
    """Each stage is reduced over the replicas once, when its gradients are complete."""
    lowered = lower(compute, gather=True)
    ends = (0, compute.num_stages - 1) if tied and compute.num_stages > 1 else ()
    end = StepEnd(replicas, ends, zero1, zero1 and not parts)
    whole = with_step_end(lowered, end)
    validate(whole, end=end)
    assert tuple(map(for_torch, whole.programs)) == lowered.programs
    for rank, program in enumerate(whole.programs):
        stages = list(compute.stages_of(rank))
        crossed = [stage for stage, op, _ in program if op is Op.REDUCE_REPLICAS]
        assert sorted(crossed) == (stages if replicas else [])
        for stage in crossed:
            place = program.index(Action(stage, Op.REDUCE_REPLICAS))
            assert program[place - 1] == Action(stage, Op.REDUCE_GRAD)
            assert Action(stage, Op.REDUCE_GRAD) not in program[place:]
        assert sum(op is Op.REDUCE_TIED for _, op, _ in program) == bool({*stages} & {*ends})
        last = Op.GATHER_UPDATED if zero1 else Op.UPDATE
        assert program[-1] == Action(stages[0], last)


def test_gradients_without_a_reduction_over_shards_are_reduced_over_replicas() -> None:
    whole = with_step_end(
        build("gpipe", num_ranks=1, chunks=1, num_microbatches=2), StepEnd(over_replicas=True)
    )
    assert " ".join(map(str, whole.programs[0])) == "0F0 0F1 0B0 0B1 0REDUCE_REPLICAS 0UPDATE"


def _broken(taken: str, put: str, before: str) -> Schedule:
    """A whole step in whose first rank the last of each of the actions ``taken`` is missing, and
    another is ``put`` before one of them, or at the end."""
    schedule = with_step_end(
        lower(build("zeropp", num_ranks=2, chunks=2, num_microbatches=4), gather=True),
        StepEnd(over_replicas=True, tied=(0, 3), gathers_updated=True, gathers_whole=True),
    )
    first = [str(action) for action in schedule.programs[0]]
    for text in taken.split():
        del first[len(first) - 1 - first[::-1].index(text)]
    if put:
        first.insert(first.index(before) if before else len(first), put)
    return replace(schedule, programs=(tuple(map(parse_action, first)), *schedule.programs[1:]))


@pytest.mark.parametrize(
    ("taken", "put", "before", "words"),
    [
        ("", "0F0", "0F1", "0F0 is repeated"),
        ("2W1", "", "", "2W1 is missing"),
        ("", "1F0", "", "belongs to rank 1"),
        ("2F0", "2F0", "0UNSHARD", "deadlock"),
        ("0UNSHARD", "", "", "without its parameters"),
        ("", "0UNSHARD", "0UNSHARD", "gathered already"),
        ("0REDUCE_GRAD", "", "", "never reduced"),
        ("2REDUCE_REPLICAS", "2REDUCE_REPLICAS", "2REDUCE_GRAD", "after 2REDUCE_REPLICAS"),
        ("2REDUCE_REPLICAS", "", "", r"stages \[2\] are not reduced over the replicas"),
        ("", "0UPDATE", "0UPDATE", "0UPDATE after the update"),
        ("0UPDATE 0GATHER_UPDATED", "", "", "there is no 0UPDATE"),
        ("0UPDATE", "2UPDATE", "0GATHER_UPDATED", "2UPDATE must name stage 0"),
        ("0GATHER_UPDATED", "0GATHER_UPDATED", "0UPDATE", "0GATHER_UPDATED before the update"),
        ("0REDUCE_TIED", "0REDUCE_TIED", "0GATHER_UPDATED", "0REDUCE_TIED after the update"),
        ("", "0REDUCE_TIED", "0REDUCE_TIED", "0REDUCE_TIED is repeated"),
        ("0REDUCE_TIED", "0REDUCE_TIED", "0UNSHARD", "after 0REDUCE_TIED"),
        ("0REDUCE_TIED", "0REDUCE_TIED", "0REDUCE_GRAD", "0REDUCE_GRAD after 0REDUCE_TIED"),
        ("", "0GATHER_UPDATED", "", "0GATHER_UPDATED is repeated"),
        ("0GATHER_UPDATED", "", "", "there is no 0GATHER_UPDATED"),
        ("0GATHER_WHOLE", "", "", "there is no 0GATHER_WHOLE"),
        ("0GATHER_WHOLE", "0GATHER_WHOLE", "0REDUCE_TIED", "0REDUCE_TIED after 0GATHER_WHOLE"),
        (
            "0GATHER_WHOLE",
            "0GATHER_WHOLE",
            "0REDUCE_REPLICAS",
            "0REDUCE_REPLICAS after 0GATHER_WHOLE",
        ),
        ("0GATHER_WHOLE", "0GATHER_WHOLE", "", "0GATHER_WHOLE after the update"),
        ("0GATHER_WHOLE", "2GATHER_WHOLE", "0UPDATE", "2GATHER_WHOLE must name stage 0"),
    ],
)
def test_a_broken_program_is_refused_with_its_grid(
    taken: str, put: str, before: str, words: str
) -> None:
    with pytest.raises(ScheduleError, match=words) as error:
        validate(_broken(taken, put, before))
    assert "[[" in str(error.value)


def test_a_tied_sum_without_its_other_rank_is_refused() -> None:
    lowered = lower(build("zeropp", num_ranks=2, chunks=1, num_microbatches=4), gather=True)
    alone = with_step_end(lowered, StepEnd(tied=(0,)))
    with pytest.raises(ScheduleError, match="0REDUCE_TIED has no other stage to add"):
        validate(alone)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (StepEnd(over_replicas=True, tied=(0, 3)), "the plan has no 0GATHER_UPDATED"),
        (StepEnd(tied=(0, 3), gathers_updated=True), "the plan has no 0REDUCE_REPLICAS"),
        (StepEnd(True, (), True), "the plan has no 0REDUCE_TIED"),
        (StepEnd(True, (0, 2), True), "rank 1, action .*: the plan has no 3REDUCE_TIED"),
        (StepEnd(True, (1, 3), True), "the plan has no 0REDUCE_TIED"),
        (StepEnd(True, (0, 3), True, True), "the plan asks for 0GATHER_WHOLE"),
    ],
)
def test_an_end_that_the_plan_does_not_ask_for_is_refused(asked: StepEnd, words: str) -> None:
    lowered = lower(build("zeropp", num_ranks=2, chunks=2, num_microbatches=4), gather=True)
    end = StepEnd(over_replicas=True, tied=(0, 3), gathers_updated=True)
    validate(with_step_end(lowered, end), end=end)
    with pytest.raises(ScheduleError, match=words):
        validate(with_step_end(lowered, end), end=asked)
    with pytest.raises(ScheduleError, match="the plan asks for 0"):
        validate(lowered, end=asked)


def test_a_cap_is_held_and_a_small_one_refused() -> None:
    schedule = build("gpipe", num_ranks=2, chunks=1, num_microbatches=4)
    with pytest.raises(ScheduleError, match="3 live chunk-activations, but only 2 are allowed"):
        validate(schedule, activation_cap=2)
    with pytest.raises(ValueError, match="needs at least 5"):
        build("zeropp", num_ranks=4, chunks=2, num_microbatches=4, activation_cap=4)
