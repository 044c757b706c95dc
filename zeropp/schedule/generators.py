"""Schedules without a split backward: GPipe, 1F1B and their relatives.

Each function returns one list of compute actions per rank. Transfers, gathers and reductions are
added later, by ``zeropp.schedule.passes``.
"""

from __future__ import annotations

from zeropp.schedule.program import Action, Op, RankProgram


def looped_bfs(num_ranks: int, chunks: int, num_microbatches: int) -> tuple[RankProgram, ...]:
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


def one_f_one_b(num_ranks: int, num_microbatches: int) -> tuple[RankProgram, ...]:
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
) -> tuple[RankProgram, ...]:
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


def _alternate(forward: list[Action], backward: list[Action], warmup: int) -> RankProgram:
    """``warmup`` forwards; then a backward and a forward in turn; then the remaining backwards."""
    warmup = min(warmup, len(forward))
    steady = [action for pair in zip(backward, forward[warmup:], strict=False) for action in pair]
    return (*forward[:warmup], *steady, *backward[len(forward) - warmup :])


# Zero-bubble schedules (arXiv 2401.10241): backward split into input and weight gradients.
#
# ZB-H1 and its interleaved form follow 1F1B's order, but rank r runs each weight gradient r input
# gradients later. ZBV puts two chunks on each rank, going down the ranks and up again. Each
# function returns one list of compute actions per rank.


def zb_h1(num_ranks: int, num_microbatches: int) -> tuple[RankProgram, ...]:
    """ZB-H1: as many activations as 1F1B's first rank, and a third of 1F1B's bubble where forward,
    input gradient and weight gradient take equally long."""
    programs = []
    for rank in range(num_ranks):
        slots = [(rank, j) for j in range(num_microbatches)]
        programs.append(_delayed(slots, slots, warmup=num_ranks - rank - 1, delay=rank))
    return tuple(programs)


def interleaved_zb(
    num_ranks: int, chunks: int, num_microbatches: int, group: int
) -> tuple[RankProgram, ...]:
    """ZB-H1 with several chunks per rank: the order of torch's ``ScheduleInterleavedZeroBubble``,
    in groups as those of ``interleaved_1f1b``."""
    programs = []
    for rank in range(num_ranks):
        forward, backward = interleaved_orders(
            rank, num_ranks, chunks, num_microbatches=num_microbatches, group=group
        )
        warmup = (chunks - 1) * group + num_ranks - 1 - rank
        programs.append(_delayed(forward, backward, warmup, delay=rank))
    return tuple(programs)


def _delayed(
    forward: list[tuple[int, int]], backward: list[tuple[int, int]], warmup: int, delay: int
) -> RankProgram:
    """``warmup`` forwards, then F, I and W in turn; W is ``delay`` input gradients behind I."""
    total = len(forward)
    warmup = min(warmup, total)
    actions = [Action(stage, Op.FORWARD, j) for stage, j in forward[:warmup]]
    for done in range(total):
        if warmup + done < total:
            actions.append(_at(forward[warmup + done], Op.FORWARD))
        actions.append(_at(backward[done], Op.BACKWARD_INPUT))
        if done >= delay:
            actions.append(_at(backward[done - delay], Op.BACKWARD_WEIGHT))
    actions += [_at(slot, Op.BACKWARD_WEIGHT) for slot in backward[max(0, total - delay) :]]
    return tuple(actions)


def zbv(num_ranks: int, num_microbatches: int) -> tuple[RankProgram, ...]:
    """ZBV: chunk 0 goes down the ranks and chunk 1 up again, so rank 0 has the first and the last
    stage.

    The order is defined for at least 2P-1 microbatches. With fewer it is the order for 2P-1
    without the actions of the microbatches that are missing.
    """
    count = max(num_microbatches, 2 * num_ranks - 1)
    return tuple(
        tuple(a for a in _zbv_rank(num_ranks, rank, count) if (a[2] or 0) < num_microbatches)
        for rank in range(num_ranks)
    )


def _zbv_rank(num_ranks: int, rank: int, count: int) -> list[Action]:
    down, up = rank, 2 * num_ranks - 1 - rank
    behind = num_ranks - rank
    tape = _Tape()
    tape.add(2 * behind - 1, (down, "F"))
    tape.add(rank, (up, "F"), (down, "F"))
    tape.add(behind, (up, "F"), (up, "I"), (up, "W"))
    steady = count - tape.done(down, "F")
    turn = ((down, "I"), (down, "W"), (up, "F"), (up, "I"), (up, "W"))
    tape.add(steady, (down, "F"), *turn)
    tape.add(count - tape.done(up, "F"), *turn)
    tape.add(rank, (down, "I"), (up, "I"))
    tape.add(behind, (down, "I"), (down, "W"))
    tape.add(count - tape.done(up, "W"), (up, "W"))
    tape.add(count - tape.done(down, "W"), (down, "W"))
    return tape.actions


class _Tape:
    """Collects actions in order and numbers the microbatches of each stage and kind by itself."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self._next: dict[tuple[int, str], int] = {}

    def done(self, stage: int, kind: str) -> int:
        return self._next.get((stage, kind), 0)

    def add(self, times: int, *steps: tuple[int, str]) -> None:
        for _ in range(times):
            for stage, kind in steps:
                number = self.done(stage, kind)
                self.actions.append(Action(stage, Op(kind), number))
                self._next[stage, kind] = number + 1


def _at(slot: tuple[int, int], op: Op) -> Action:
    return Action(slot[0], op, slot[1])
