"""The lowering for torch's runtime over FSDP2, held against that runtime's own rules."""

from __future__ import annotations

import pytest

from zeropp.schedule.build import build
from zeropp.schedule.program import Action, Op, RankProgram
from zeropp.schedule.torch_runtime import lower_for_torch


def run_by_torchs_rules(program: RankProgram) -> None:
    """Raises AssertionError where torch's runtime does, or where it would go on with parameters
    that it believes to be gathered: its own reductions have released them."""
    noted: set[int] = set()
    gathered: set[int] = set()
    for stage, op, _ in program:
        if op is Op.UNSHARD:
            assert stage not in noted
            noted.add(stage)
            gathered.add(stage)
        elif op is Op.RESHARD:
            assert stage in noted
            noted.remove(stage)
            gathered.discard(stage)
        elif op is Op.REDUCE_GRAD:
            gathered.discard(stage)
        elif op.is_compute:
            assert stage in noted & gathered
    assert not noted


@pytest.mark.parametrize("prefetch", [0, 1, 2])
@pytest.mark.parametrize(
    ("name", "ranks", "chunks", "microbatches", "unit"),
    [
        ("zeropp", 2, 2, 8, 4),
        ("zeropp", 4, 4, 16, 8),
        ("zeropp", 4, 2, 10, 4),  # the last unit is shorter
        ("zeropp", 3, 3, 9, 3),
        ("zeropp", 4, 1, 8, 8),
        ("interleaved_1f1b", 4, 2, 8, None),
        ("zbv", 4, 2, 8, None),
    ],
)
def test_torch_finds_every_stage_gathered(
    name: str, ranks: int, chunks: int, microbatches: int, unit: int | None, prefetch: int
) -> None:
    compute = build(name, num_ranks=ranks, chunks=chunks, num_microbatches=microbatches, unit=unit)
    schedule = lower_for_torch(compute, prefetch=prefetch)
    for program, given in zip(schedule.programs, compute.programs, strict=True):
        run_by_torchs_rules(program)
        assert tuple(a for a in program if a.op.is_compute) == given
    units = -(-microbatches // (unit or microbatches))
    for stage, rank in enumerate(compute.stage_rank):
        assert schedule.programs[rank].count(Action(stage, Op.REDUCE_GRAD)) == units
