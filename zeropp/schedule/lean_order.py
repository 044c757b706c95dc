"""ZeroPP's order on a V-shaped placement, which needs few activations.

With stages in a loop, a rank's first chunk is early in the data flow and its last one late. A
microbatch must pass all later stages before its activations in the first chunk are freed, and with
units it also waits for its unit. On a V (``0 1 .. P-1 P-1 .. 1 0``, and with more chunks down and
up again) early and late stages are on the same rank, and microbatches follow each other one by one,
in a pattern that repeats (``pattern``). With half of 1F1B's activations the step is then hardly
longer, with a third of them somewhat. In return a rank works on another chunk with every action, so
all its chunks are gathered once and stay gathered during the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from itertools import product

from zeropp.schedule.action import Action, Op
from zeropp.schedule.justify import Actions, Order, justify
from zeropp.schedule.pattern import Pattern, find_pattern
from zeropp.schedule.program import Program, StageCost

_KINDS = (Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)
_FULL_KINDS = (Op.FORWARD, Op.FULL_BACKWARD, Op.BACKWARD_WEIGHT)
_PASSES = ((80_000, 5), (150_000, 3))  # (most actions of a step, passes); larger steps: 1 pass


def lean_programs(
    stage_rank: tuple[int, ...],
    num_microbatches: int,
    activation_cap: int,
    costs: Sequence[StageCost],
    *,
    split_backward: bool = True,
) -> tuple[Program, ...]:
    """The compute actions of every rank, planned with ``costs`` (one per stage).

    A rank never holds more than ``activation_cap`` chunk-activations. Raises ValueError if a single
    microbatch needs more.
    """
    pattern = find_pattern(stage_rank, activation_cap, split_backward)
    chunks = len(stage_rank) // len(set(stage_rank))
    actions = Actions(stage_rank, num_microbatches, split_backward, window=6 * chunks)
    order = _repeated(actions, pattern)
    total = len(_KINDS) * actions.per_kind
    passes = next((passes for most, passes in _PASSES if total <= most), 1)
    found = []
    for last in (False, True) if total <= _PASSES[0][0] else (False,):
        with suppress(ValueError):  # durations far apart may leave no way to keep the cap
            found.append(
                justify(actions, order, costs, activation_cap, passes=passes, weights_last=last)
            )
    if not found:
        equal = [StageCost()] * len(stage_rank)
        found = [justify(actions, order, equal, activation_cap, passes=1, weights_last=False)]
    best = min(found, key=lambda result: result.step_s)
    return tuple(_program(actions, rank) for rank in best.order)


def least_over_ideal(num_ranks: int, chunks: int, num_microbatches: int, cap: int) -> float:
    """A lower bound of the step over its ideal for every order in which no rank ever holds more
    than ``cap`` chunk-activations, by how long these are held; all actions take one unit of time.

    Stage s of S = P*V, counted from 0, holds an activation for at least 2(S - s) + 1: from its
    forward through all later stages and back, to the end of its weight gradient. All of a step
    are held for m(S*S + 2S) together. A rank has room for ``cap`` at a time, but rank r has none
    before time r, and one more per unit of time after that; towards the end it frees one per unit
    of time.
    """
    stages, m = num_ranks * chunks, num_microbatches
    full = m * (stages * stages + 2 * stages) / (num_ranks * cap)
    ends = min(cap, m * chunks) - 1 + (num_ranks - 1) / 2
    return max(1.0, (full + ends) / (3 * m * chunks))


def _repeated(actions: Actions, pattern: Pattern) -> Order:
    """Every rank's actions in the order of their slots; the pattern is repeated per microbatch."""
    starts = [pattern.forward, pattern.backward_input, pattern.backward_weight]
    kinds = starts if actions.split_backward else starts[:2]
    slots: list[list[tuple[int, int]]] = [[] for _ in range(max(actions.stage_rank) + 1)]
    microbatches = range(actions.num_microbatches)
    for (kind, by_stage), (stage, rank) in product(enumerate(kinds), enumerate(actions.stage_rank)):
        first = kind * actions.per_kind + stage * actions.num_microbatches
        slots[rank] += [(by_stage[stage] + j * pattern.period, first + j) for j in microbatches]
    return [[action for _, action in sorted(rank)] for rank in slots]


def _program(actions: Actions, order: Sequence[int]) -> Program:
    ops = _KINDS if actions.split_backward else _FULL_KINDS
    per_kind, count = actions.per_kind, actions.num_microbatches
    return tuple(
        Action(number % per_kind // count, ops[number // per_kind], number % count)
        for number in order
    )
