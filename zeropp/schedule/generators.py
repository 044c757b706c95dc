"""Schedules without a split backward: GPipe, 1F1B and their relatives.

Each function returns one list of compute actions per rank. Transfers, gathers and reductions are
added later, by ``zeropp.schedule.passes``.
"""

from __future__ import annotations

from zeropp.schedule.action import Action, Op
from zeropp.schedule.program import Program


def looped_bfs(num_ranks: int, chunks: int, num_microbatches: int) -> tuple[Program, ...]:
    """Breadth first: all microbatches run through chunk 0, then all through chunk 1, and so on;
    the backward takes the chunks in reverse (arXiv 2211.05953, figure 4). With one chunk per rank
    this is GPipe (arXiv 1811.06965)."""
    microbatches = range(num_microbatches)
    programs = []
    for rank in range(num_ranks):
        stages = [chunk * num_ranks + rank for chunk in range(chunks)]
        forward = [Action(s, Op.FORWARD, j) for s in stages for j in microbatches]
        backward = [Action(s, Op.FULL_BACKWARD, j) for s in reversed(stages) for j in microbatches]
        programs.append((*forward, *backward))
    return tuple(programs)


def one_f_one_b(num_ranks: int, num_microbatches: int) -> tuple[Program, ...]:
    """1F1B, PipeDream-flush (arXiv 2006.09503).

    Rank r begins with P - r forwards and then alternates between one backward and one forward.
    DeepSpeed's ``TrainSchedule`` and Megatron's non-interleaved schedule have the same order.
    """
    programs = []
    for rank in range(num_ranks):
        forward = [Action(rank, Op.FORWARD, j) for j in range(num_microbatches)]
        backward = [Action(rank, Op.FULL_BACKWARD, j) for j in range(num_microbatches)]
        programs.append(_alternate(forward, backward, warmup=num_ranks - rank))
    return tuple(programs)


def interleaved_1f1b(
    num_ranks: int, chunks: int, num_microbatches: int, group: int
) -> tuple[Program, ...]:
    """Megatron's interleaved 1F1B (arXiv 2104.04473, section 2.2).

    Microbatches go through the chunks in groups of ``group``, P in the paper; the last group may be
    smaller (``microbatch_group_size_per_vp_stage`` in megatron/core/pipeline_parallel/schedules.py,
    core_v0.12; the rounds of torch's ``ScheduleInterleaved1F1B``).
    """
    programs = []
    for rank in range(num_ranks):
        down, up = interleaved_orders(
            rank, num_ranks, chunks, num_microbatches=num_microbatches, group=group
        )
        forward = [Action(stage, Op.FORWARD, j) for stage, j in down]
        backward = [Action(stage, Op.FULL_BACKWARD, j) for stage, j in up]
        warmup = 2 * (num_ranks - rank - 1) + (chunks - 1) * group + 1
        programs.append(_alternate(forward, backward, warmup))
    return tuple(programs)


def interleaved_orders(
    rank: int, num_ranks: int, chunks: int, *, num_microbatches: int, group: int
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """The (stage, microbatch) pairs of one rank in the order of its forwards, and in that of its
    backwards, which go through the chunks from the last to the first; in groups of microbatches."""
    forward, backward = (
        [
            (chunk * num_ranks + rank, microbatch)
            for first in range(0, num_microbatches, group)
            for chunk in chunk_order
            for microbatch in range(first, min(first + group, num_microbatches))
        ]
        for chunk_order in (range(chunks), range(chunks)[::-1])
    )
    return forward, backward


def _alternate(forward: list[Action], backward: list[Action], warmup: int) -> Program:
    """``warmup`` forwards; then a backward and a forward in turn; then the remaining backwards."""
    warmup = min(warmup, len(forward))
    steady = [action for pair in zip(backward, forward[warmup:], strict=False) for action in pair]
    return (*forward[:warmup], *steady, *backward[len(forward) - warmup :])
