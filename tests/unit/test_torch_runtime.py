"""The lowering for torch's runtime over FSDP2, held against that runtime's own rules."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import pytest

from zeropp.schedule import validate
from zeropp.schedule.build import build
from zeropp.schedule.program import Action, Op, RankProgram, Schedule
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


def without_gathers(program: RankProgram) -> RankProgram:
    """What the project's own validation knows of a program for torch."""
    return tuple(a for a in program if a.op not in (Op.UNSHARD, Op.RESHARD, Op.REDUCE_GRAD))


def pass_messages_on_one_stream(schedule: Schedule) -> None:
    """Raises AssertionError where ranks wait for ever that run their messages one after another, as
    NCCL does: one is over when both ranks have come to it."""
    waiting = [deque(a for a in p if a.op.is_transfer) for p in schedule.programs]
    while any(waiting):
        heads = {rank: messages[0] for rank, messages in enumerate(waiting) if messages}
        both = [
            (rank, schedule.stage_rank[stage + away])
            for rank, (stage, op, microbatch) in heads.items()
            for send, receive, away in ((Op.SEND_F, Op.RECV_F, 1), (Op.SEND_B, Op.RECV_B, -1))
            if op is send
            and heads.get(schedule.stage_rank[stage + away])
            == Action(stage + away, receive, microbatch)
        ]
        assert both, f"every rank waits: {sorted(map(str, heads.values()))}"
        for rank in both[0]:
            waiting[rank].popleft()


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
    pass_messages_on_one_stream(schedule)
    validate(replace(schedule, programs=tuple(map(without_gathers, schedule.programs))))
    units = -(-microbatches // (unit or microbatches))
    for stage, rank in enumerate(compute.stage_rank):
        assert schedule.programs[rank].count(Action(stage, Op.REDUCE_GRAD)) == units
