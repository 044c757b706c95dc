"""The event loop: hand-counted steps, lanes beside each other, deadlock."""

from __future__ import annotations

from dataclasses import replace

import pytest

from zeropp.schedule import lower
from zeropp.schedule.build import build
from zeropp.schedule.event_loop import run
from zeropp.schedule.program import DeadlockError, RankProgram, Schedule, StageCost, parse_action


def program(text: str) -> RankProgram:
    return tuple(parse_action(word) for word in text.split())


def scheduled(programs: tuple[RankProgram, ...], stage_rank: tuple[int, ...]) -> Schedule:
    return Schedule(
        name="test", num_microbatches=2, unit=2, stage_rank=stage_rank, programs=programs
    )


def test_gpipe_by_hand() -> None:
    """P=2, m=3, F=1, I=2, W=1, messages 0.5: fill 1.5, work 3*(1+3), drain 0.5 + 3."""
    cost = StageCost(forward=1.0, backward_input=2.0, backward_weight=1.0, transfer=0.5)
    result = run(build("gpipe", num_ranks=2, chunks=1, num_microbatches=3), [cost] * 2)
    assert result.step_s == pytest.approx(1.5 + 12 + 0.5 + 3)
    assert result.busy == (12.0, 12.0)
    assert result.over_ideal == pytest.approx(17 / 12)
    assert result.bubble == pytest.approx(5 / 17)


@pytest.mark.parametrize(("ranks", "m"), [(2, 2), (4, 8), (8, 16)])
def test_1f1b_takes_its_textbook_step(ranks: int, m: int) -> None:
    result = run(
        build("1f1b", num_ranks=ranks, chunks=1, num_microbatches=m), [StageCost()] * ranks
    )
    assert result.step_s == 3 * (m + ranks - 1)


def test_a_gather_runs_beside_compute_and_only_the_rest_is_exposed() -> None:
    """The second gather takes 3 beside a forward of 1 and ends 2 later than that forward."""
    words = "0UNSHARD 1UNSHARD 0F0 1F0 1B0 0B0 0REDUCE_GRAD 1REDUCE_GRAD"
    result = run(
        scheduled((program(words),), (0, 0)), [StageCost(unshard=3.0, reduce_grad=1.0)] * 2
    )
    assert result.exposed_gather == (3.0 + 2.0,)
    assert result.exposed_wait == (0.0,)
    assert result.step_s == pytest.approx(6 + 1 + 2 + 2 + 1 + 1)


@pytest.mark.parametrize(("waits", "step_s"), [(False, 4 + 8 + 8), (True, 4 + 8 + 2 + 8)])
def test_compute_may_have_to_wait_for_a_reduction(waits: bool, step_s: float) -> None:
    """Stage 1 is reduced in 8, beside the backward of stage 0, which takes 2, or before it."""
    words = "0F0 1F0 1B0 1REDUCE_GRAD 0B0 0REDUCE_GRAD"
    cost = StageCost(reduce_grad=8.0, waits_for_reduction=waits)
    result = run(scheduled((program(words),), (0, 0)), [cost] * 2)
    assert result.step_s == step_s


FULL = "0F0 1F0 1B0 1REDUCE_GRAD 0B0 0REDUCE_GRAD"


@pytest.mark.parametrize(
    ("words", "parts", "reduce_s", "step_s"),
    [
        (FULL, 1, 6.0, 18.0),  # stage 1 is reduced from 6 to 12, stage 0 to 18
        # The first of a backward's 4 is recomputation. Stage 1's parts are complete at 4.5 and 6,
        # and reduced at 7.5 and 10.5. Stage 0 would come to them at 7 and 8.5. It does at 7.5 and
        # 10.5, and ends at 12; its own are complete at 10.5 and 12, and reduced at 13.5 and 16.5.
        (FULL, 2, 6.0, 16.5),
        # Weight gradients of 2: stage 1's are complete at 7 and 8, and reduced at 9 and 11. So
        # those of stage 0, from 8 on, are complete at 11 and 12, and reduced at 13 and 15.
        ("0F0 1F0 1I0 0I0 1W0 1REDUCE_GRAD 0W0 0REDUCE_GRAD", 2, 4.0, 15.0),
        # None waits: complete at 7 and 8, then at 9 and 10; the last part takes 0.5.
        ("0F0 1F0 1I0 0I0 1W0 1REDUCE_GRAD 0W0 0REDUCE_GRAD", 2, 1.0, 10.5),
    ],
)
def test_parts_share_one_buffer(words: str, parts: int, reduce_s: float, step_s: float) -> None:
    cost = StageCost(
        backward_input=2.0, backward_weight=2.0, again=1.0, reduce_grad=reduce_s, parts=parts
    )
    assert run(scheduled((program(words),), (0, 0)), [cost] * 2).step_s == step_s


def test_copies_stand_in_line_with_compute_and_weight_gradients_need_none() -> None:
    """Copy-out before the first action that uses the parameters, copy-in before the reduction."""
    words = "0UNSHARD 0F0 0I0 0RESHARD 0UNSHARD 0W0 0REDUCE_GRAD 0F1 0I1 0W1 0REDUCE_GRAD 0RESHARD"
    cost = StageCost(unshard=0.5, copy_out=2.0, copy_in=3.0)
    result = run(scheduled((program(words),), (0,)), [cost])
    named = dict(zip(words.split(), zip(result.start[0], result.end[0], strict=True), strict=False))
    assert named["0F0"] == (0.5 + 2.0, 3.5)
    assert named["0W0"] == (4.5, 5.5)  # no copy, though the parameters came before it
    assert named["0F1"] == (10.5, 11.5)  # after the copy-in of 3 and its own copy-out of 2
    assert result.busy == (6 + 2 * 2 + 2 * 3,)


def test_parameters_are_copied_while_their_first_action_waits_for_its_input() -> None:
    """As torch's runtime asks for parameters (``_assert_unsharded``) before it waits for a receive:
    the forward of stage 1 begins when the message is there, after 1 + 4."""
    first, second = (program(f"{n}UNSHARD {n}F0 {n}B0") for n in (0, 1))
    cost = StageCost(transfer=4.0)
    result = run(scheduled((first, second), (0, 1)), [cost, replace(cost, copy_out=3.0)])
    assert result.start[1][1] == 5.0
    assert result.exposed_wait[1] == 2.0


END = StageCost(
    reduce_grad=1.0, reduce_replicas=4.0, reduce_tied=0.5, gather_whole=1.5, update=2.0,
    gather_updated=3.0,
)  # fmt: skip


def test_the_update_waits_for_all_reductions_which_have_a_lane_of_their_own() -> None:
    """Both lanes of reductions work side by side; the tied sum and the update stand in line."""
    words = (
        "0F0 1F0 1B0 1REDUCE_GRAD 1REDUCE_REPLICAS 0B0 0REDUCE_GRAD 0REDUCE_REPLICAS "
        "0REDUCE_TIED 0GATHER_WHOLE 0UPDATE 0GATHER_UPDATED"
    )
    result = run(scheduled((program(words),), (0, 0)), [END] * 2)
    named = dict(zip(words.split(), zip(result.start[0], result.end[0], strict=True), strict=True))
    expected = {
        "1REDUCE_GRAD": (4.0, 5.0),
        "1REDUCE_REPLICAS": (5.0, 9.0),
        "0REDUCE_GRAD": (6.0, 7.0),  # beside the other stage's sum over the replicas
        "0REDUCE_REPLICAS": (9.0, 13.0),
        "0REDUCE_TIED": (13.0, 13.5),
        "0GATHER_WHOLE": (13.5, 15.0),
        "0UPDATE": (15.0, 17.0),
        "0GATHER_UPDATED": (17.0, 20.0),
    }
    assert {name: named[name] for name in expected} == expected
    assert result.updated == (result.step_s,) == (20.0,)
    assert result.busy == (6.0,)
    lanes = {span.action: span.lane for span in result.spans()}
    assert lanes["0UPDATE"] == lanes["0REDUCE_TIED"] == "compute"
    assert (lanes["0REDUCE_REPLICAS"], lanes["0GATHER_UPDATED"]) == ("replicas", "gather")


def test_the_program_says_in_which_order_replicas_are_reduced() -> None:
    """The other way round the lane waits for the stage that is ready last."""
    words = "0F0 1F0 1B0 1REDUCE_GRAD 0B0 0REDUCE_GRAD 0REDUCE_REPLICAS 1REDUCE_REPLICAS 0UPDATE"
    result = run(scheduled((program(words),), (0, 0)), [END] * 2)
    named = dict(zip(words.split(), result.start[0], strict=True))
    assert (named["0REDUCE_REPLICAS"], named["1REDUCE_REPLICAS"]) == (7.0, 11.0)
    assert result.step_s == 11.0 + 4.0 + 2.0


def test_a_rank_that_begins_its_next_step_waits_for_its_own_update_alone() -> None:
    words = ("0F0 0B0 0REDUCE_GRAD 0UPDATE", "1F0 1B0 1REDUCE_GRAD 1UPDATE")
    result = run(scheduled(tuple(map(program, words)), (0, 1)), [END] * 2)
    assert result.updated == (6.0 + 1.0 + 2.0, 4.0 + 1.0 + 2.0)


def test_a_boundary_takes_as_long_either_way() -> None:
    costs = [StageCost(transfer=0.25), StageCost(transfer=9.0)]
    compute = build("1f1b", num_ranks=2, chunks=1, num_microbatches=1)
    expected = 1 + 0.25 + 1 + 2 + 0.25 + 2  # there, turn round, and back
    for schedule in (compute, lower(compute, gather=False)):
        assert run(schedule, costs).step_s == pytest.approx(expected)


def test_lowering_alone_adds_no_time_when_communication_is_free() -> None:
    compute = build("zeropp", num_ranks=4, chunks=2, num_microbatches=8)
    costs = [StageCost()] * 8
    assert run(lower(compute, gather=True), costs).step_s == run(compute, costs).step_s


def test_spans_cover_the_busy_time_and_never_overlap_on_a_lane() -> None:
    costs = [
        StageCost(
            forward=1.0,
            backward_input=1.5,
            backward_weight=0.7,
            unshard=0.4,
            reduce_grad=0.3,
            transfer=0.2,
        )
    ] * 8
    schedule = lower(build("zeropp", num_ranks=4, chunks=2, num_microbatches=8), gather=True)
    result = run(schedule, costs)
    for rank in range(4):
        spans = [s for s in result.spans() if s.rank == rank and s.lane == "compute"]
        assert sum(s.end_s - s.start_s for s in spans) == pytest.approx(result.busy[rank])
        starts = [s.start_s for s in spans[1:]]
        ends = [s.end_s for s in spans[:-1]]
        assert all(end <= start + 1e-9 for end, start in zip(ends, starts, strict=True))


def test_a_deadlock_says_where_every_rank_stands() -> None:
    programs = (program("0F0 0B0 0F1 0B1"), program("1F1 1F0 1B0 1B1"))
    with pytest.raises(DeadlockError, match="rank 0 at 0B0, rank 1 at 1F1"):
        run(scheduled(programs, (0, 1)), [StageCost()] * 2)


@pytest.mark.parametrize(("pair_streams", "waits"), [(False, 2.0), (True, 4.0)])
def test_a_receive_that_waits_holds_up_what_its_pair_sends_behind_it(
    pair_streams: bool, waits: float
) -> None:
    """Rank 1 waits 2 for its first message. Its second one could leave rank 0 after 2, but a
    receive has been posted there before, of what rank 1 sends from 6 to 7."""
    first = program("0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1")
    programs = (first, program("1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1"))
    costs = [StageCost(transfer=1.0), StageCost(forward=2.0, transfer=1.0)]
    schedule = Schedule(
        name="test",
        num_microbatches=2,
        unit=2,
        stage_rank=(0, 1),
        programs=programs,
        pair_streams=pair_streams,
    )
    assert run(schedule, costs).exposed_wait == (0.0, waits)
