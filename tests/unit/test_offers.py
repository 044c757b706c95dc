"""What the search tries for each contender is what its program can be set to."""

from __future__ import annotations

from dataclasses import fields

import pytest

from baselines.torch_pp.contender import (
    SCHEDULES,
    SPLIT_BACKWARD,
    TORCH_PP,
    TORCHTITAN,
    UNSPLIT,
    TorchPPKnobs,
    TorchtitanKnobs,
    torch_schedule,
)
from benchmarks.specification.contenders import COMPARED, PRICED
from tests.unit.simulated_task import task
from zeropp.price.programs import program_named
from zeropp.schedule.legality import ScheduleError
from zeropp.types.layout import InfeasibleError


def _schedules(contender: object, asked: TorchPPKnobs) -> set[str]:
    assert contender in (TORCHTITAN, TORCH_PP)
    found = (TORCHTITAN if contender is TORCHTITAN else TORCH_PP).candidates(task(4, 8), asked)
    return {str(candidate.knobs.schedule) for candidate, _ in found}


def test_the_backward_of_compiled_blocks_is_never_split() -> None:
    assert _schedules(TORCHTITAN, TorchtitanKnobs()) == set(UNSPLIT)
    assert _schedules(TORCH_PP, TorchPPKnobs(compile=True)) == set(UNSPLIT)
    assert _schedules(TORCH_PP, TorchPPKnobs()) == set(SCHEDULES)


@pytest.mark.parametrize("schedule", SPLIT_BACKWARD)
def test_a_compiled_split_backward_is_refused(schedule: str) -> None:
    asked = TorchtitanKnobs(pp=2, schedule=schedule)  # type: ignore[arg-type]
    with pytest.raises(InfeasibleError, match="torch cannot split a compiled backward"):
        TORCHTITAN.size(task(4, 8), asked, 1)


def test_a_step_of_groups_that_are_larger_than_a_round_is_told_by_no_shorter_one() -> None:
    asked = TorchPPKnobs(pp=8, chunks=2, schedule="interleaved_1f1b")
    for microbatches, period in ((63, 63), (64, 8)):
        assert TORCH_PP.size(task(8, microbatches), asked, 1).period == period
    with pytest.raises(ScheduleError, match="every rank waits"):
        torch_schedule(
            "interleaved_1f1b", num_ranks=16, chunks=3, num_microbatches=56, gathered=True
        )


def test_some_blocks_of_a_stage_are_recomputed_wherever_the_program_can() -> None:
    for name, contender in PRICED.items():
        found = (
            getattr(candidate.knobs, "recompute_blocks", "auto")
            for candidate, _ in contender.candidates(task(4, 8))
        )
        counts = (count for count in found if count != "auto")
        first = next(counts, None)
        several = any(count != first for count in counts)
        knobs = {field.name: str(field.type) for field in fields(contender.knobs)}
        takes_a_number = "int" in knobs.get("recompute_blocks", "")
        assert (first is not None, several) == (takes_a_number, takes_a_number), name


def test_programs_of_2025_keep_16_bit_logits_and_overlap_tensor_parallelism() -> None:
    """Both halves of what a comparison with these programs depends on most."""
    for contender in ("megatron_core", "torchtitan"):
        made = PRICED[contender]
        program = program_named(made.size(task(4, 8), made.knobs(), 1).program)
        assert program.fused_loss
        assert program.overlap_tensor


def test_every_contender_that_runs_here_is_in_the_verdict_unless_it_says_otherwise() -> None:
    runnable = [contender for contender in PRICED.values() if contender.trainer]
    compared = {row.contender.name for row in COMPARED.values()}
    wanted = {contender.name for contender in runnable if contender.in_verdict}
    assert len(wanted) > 3
    assert wanted == compared & {contender.name for contender in runnable}
