"""Patterns for V-shaped placements: the work of one microbatch, repeated at a fixed period.

A microbatch is a chain of forwards through all stages and of backwards in the other direction. If
one is started every ``period`` slots, and no two actions of a rank have the same slot modulo the
period, then every rank does the same in every period and never waits: a steady state without a
bubble (arXiv 2405.15362, section 3, calls the pattern the building block). Its memory follows from
how long each activation is held. So the search for an order with few activations is a search over a
few small patterns, whatever the number of microbatches. A slot is the duration of one forward; each
of the two parts of a backward takes one slot, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

_TURNS = range(13)  # slots between a microbatch's last forward and its first backward, to be tried


@dataclass(frozen=True, kw_only=True)
class Pattern:
    """The slots in which one microbatch's actions start, per stage; the next one starts ``period``
    slots later.

    Without a split backward ``backward_weight`` is the second slot of the full backward. ``peak``
    is the largest number of live chunk-activations on any rank once the pattern repeats.
    """

    period: int
    forward: tuple[int, ...]
    backward_input: tuple[int, ...]
    backward_weight: tuple[int, ...]
    peak: int


@lru_cache(maxsize=256)
def find_pattern(stage_rank: tuple[int, ...], cap: int, split_backward: bool) -> Pattern:
    """The pattern with the shortest period that needs at most ``cap`` activations, and of several
    the one that needs the fewest.

    ``cap`` counts chunk-activations per rank and must be at least the number of chunks per rank;
    with exactly that many, one microbatch after the other passes through. Raises ValueError if it
    is smaller.
    """
    chunks = len(stage_rank) // len(set(stage_rank))
    if cap < chunks:
        raise ValueError(
            f"activation_cap={cap}: a microbatch in {chunks} chunks of one rank needs at least "
            f"{chunks} live chunk-activations"
        )
    for period in _periods(chunks, 8 * len(stage_rank)):
        tried = (_repeat(stage_rank, period, turn, split_backward) for turn in _TURNS)
        best = min(tried, key=_leanness)
        if best.peak <= cap:
            return best
    raise AssertionError("the longest period holds a single microbatch")


def _leanness(pattern: Pattern) -> tuple[int, int]:
    """Peak first, then the sum of all activations' lifetimes."""
    return pattern.peak, sum(pattern.backward_weight) - sum(pattern.forward)


def _periods(chunks: int, longest: int) -> Iterator[int]:
    """Periods to try: every one up to twice the work of a microbatch, then 10 % apart."""
    period = 3 * chunks
    while period < longest:
        yield period
        period += 1 if period < 6 * chunks else max(1, period // 10)
    yield longest


def _repeat(stage_rank: Sequence[int], period: int, turn: int, split_backward: bool) -> Pattern:
    """Put each action of the chain into its first free slot, then weight gradients into what is
    left."""
    stages = range(len(stage_rank))
    taken = [bytearray(period) for _ in range(max(stage_rank) + 1)]
    forward, backward_input = [0] * len(stage_rank), [0] * len(stage_rank)
    time = 0
    for stage in stages:
        forward[stage] = _take(taken[stage_rank[stage]], time, 1)
        time = forward[stage] + 1
    time += turn
    slots = 1 if split_backward else 2
    for stage in reversed(stages):
        backward_input[stage] = _take(taken[stage_rank[stage]], time, slots)
        time = backward_input[stage] + slots
    backward_weight = [start + 1 for start in backward_input]
    if split_backward:
        for stage in reversed(stages):
            start = backward_weight[stage]
            backward_weight[stage] = _take(taken[stage_rank[stage]], start, 1)
    peak = _peak(stage_rank, period, forward, backward_weight)
    return Pattern(
        period=period,
        forward=tuple(forward),
        backward_input=tuple(backward_input),
        backward_weight=tuple(backward_weight),
        peak=peak,
    )


def _take(taken: bytearray, time: int, slots: int) -> int:
    """Occupy the first ``slots`` slots in a row from ``time`` on; returns when they start.

    If a full backward finds no two free slots in a row, it starts at ``time`` although another
    action has that slot. Then the pattern is not exact, and ``justify`` moves one of the two.
    """
    period = len(taken)
    for start in range(time, time + period):
        if not any(taken[(start + slot) % period] for slot in range(slots)):
            for slot in range(slots):
                taken[(start + slot) % period] = 1
            return start
    return time


def _peak(
    stage_rank: Sequence[int], period: int, forward: Sequence[int], released: Sequence[int]
) -> int:
    """The largest number of activations that a rank holds at a time: each from the slot of its
    forward to that of its weight gradient, both included."""
    change = [[0] * (period + 1) for _ in range(max(stage_rank) + 1)]
    whole = [0] * len(change)
    for stage, rank in enumerate(stage_rank):
        periods, rest = divmod(released[stage] + 1 - forward[stage], period)
        whole[rank] += periods
        first = forward[stage] % period
        change[rank][first] += 1
        change[rank][min(first + rest, period)] -= 1
        if first + rest > period:
            change[rank][0] += 1
            change[rank][first + rest - period] -= 1
    return max(base + _highest(steps) for base, steps in zip(whole, change, strict=True))


def _highest(steps: Sequence[int]) -> int:
    """The largest partial sum."""
    level = highest = 0
    for step in steps:
        level += step
        highest = max(highest, level)
    return highest
