"""Generators of compute-only schedules without split backward: GPipe, 1F1B and their relatives.

Each returns one list of actions a rank; transfers, gathers and reductions are the passes' work.
"""

from __future__ import annotations

from zeropp.schedule.action import Action, Op
from zeropp.schedule.program import Program


def looped_bfs(num_ranks: int, chunks: int, num_microbatches: int) -> tuple[Program, ...]:
    """Breadth first over chunks: every microbatch through chunk 0, then chunk 1 ...; back in
    reverse (arXiv 2211.05953, figure 4). With one chunk this is GPipe (arXiv 1811.06965)."""
    microbatches = range(num_microbatches)
    programs = []
    for rank in range(num_ranks):
        stages = [chunk * num_ranks + rank for chunk in range(chunks)]
        forward = [Action(s, Op.FORWARD, j) for s in stages for j in microbatches]
        backward = [Action(s, Op.FULL_BACKWARD, j) for s in reversed(stages) for j in microbatches]
        programs.append((*forward, *backward))
    return tuple(programs)


def one_f_one_b(num_ranks: int, num_microbatches: int) -> tuple[Program, ...]:
    """PipeDream-flush (arXiv 2006.09503): P - r forwards to fill, then one backward, one forward.

    The order of DeepSpeed's ``TrainSchedule`` and of Megatron's non-interleaved schedule.
    """
    programs = []
    for rank in range(num_ranks):
        forward = [Action(rank, Op.FORWARD, j) for j in range(num_microbatches)]
        backward = [Action(rank, Op.FULL_BACKWARD, j) for j in range(num_microbatches)]
        programs.append(_alternate(forward, backward, warmup=num_ranks - rank))
    return tuple(programs)


def interleaved_1f1b(num_ranks: int, chunks: int, num_microbatches: int) -> tuple[Program, ...]:
    """Megatron's interleaved 1F1B (arXiv 2104.04473, section 2.2).

    Microbatches go through the chunks in groups of P. Raises ValueError where P does not divide
    the microbatches: the order is not defined there.
    """
    if num_microbatches % num_ranks:
        raise ValueError(
            f"interleaved_1f1b: num_microbatches={num_microbatches} must be a multiple of "
            f"num_ranks={num_ranks}"
        )
    total = num_microbatches * chunks

    def place(step: int, rank: int, backward: bool) -> tuple[int, int]:
        group, within = divmod(step, num_ranks * chunks)
        chunk, offset = divmod(within, num_ranks)
        chunk = chunks - 1 - chunk if backward else chunk
        return chunk * num_ranks + rank, group * num_ranks + offset

    programs = []
    for rank in range(num_ranks):
        forward, backward = [], []
        for step in range(total):
            stage, microbatch = place(step, rank, backward=False)
            forward.append(Action(stage, Op.FORWARD, microbatch))
            stage, microbatch = place(step, rank, backward=True)
            backward.append(Action(stage, Op.FULL_BACKWARD, microbatch))
        warmup = 2 * (num_ranks - rank - 1) + (chunks - 1) * num_ranks + 1
        programs.append(_alternate(forward, backward, warmup))
    return tuple(programs)


def _alternate(forward: list[Action], backward: list[Action], warmup: int) -> Program:
    """``warmup`` forwards, then backward and forward in turn, then the backwards that remain."""
    warmup = min(warmup, len(forward))
    steady = [action for pair in zip(backward, forward[warmup:], strict=False) for action in pair]
    return (*forward[:warmup], *steady, *backward[len(forward) - warmup :])
