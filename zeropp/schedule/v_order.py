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

import heapq
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from zeropp.schedule.program import Action, Op, Program, StageCost

# Patterns for V-shaped placements: the work of one microbatch, repeated at a fixed period.
#
# A microbatch is a chain of forwards through all stages and of backwards in the other direction. If
# one is started every ``period`` slots, and no two actions of a rank have the same slot modulo the
# period, then every rank does the same in every period and never waits: a steady state without a
# bubble (arXiv 2405.15362, section 3, calls the pattern the building block). Its memory follows
# from how long each activation is held. So the search for an order with few activations is a search
# over a few small patterns, whatever the number of microbatches. A slot is the duration of one
# forward; each of the two parts of a backward takes one slot, too.


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


# Closes the gaps of an order at both ends of a step, without ever exceeding the activation cap.
#
# The input is a legal order of every rank's actions that was made for the middle of a step, where a
# pattern repeats. A forward pass runs it as a list scheduler: a rank whose next action cannot start
# yet takes the first later one that can, if memory allows. This fills the start of the step. A
# backward pass does the same in reversed time, from the last action to the first. This fills the
# end of the step with delayed weight gradients. Passes alternate, and each may improve on the one
# before (in project scheduling this is known as forward-backward improvement, or justification:
# Tormos and Lova, Annals of Operations Research 102, 2001).
#
# No pass can deadlock or break the cap, because an action is moved before others only if the order
# that remains, with that action at its front, still keeps the cap everywhere.


_FORWARD, _BACKWARD, _WEIGHT = range(3)
_COMPUTE_KINDS = 3


@dataclass(frozen=True)
class Actions:
    """All actions of a step as numbers, so that a pass over a million of them stays cheap.

    Action ``kind * stages * microbatches + stage * microbatches + microbatch``, with kind 0 a
    forward, 1 a backward (of the input, or full where ``split_backward`` is off), 2 a weight
    gradient. ``window``: how many places ahead a rank looks for something to do.
    """

    stage_rank: tuple[int, ...]
    num_microbatches: int
    split_backward: bool
    window: int

    @property
    def per_kind(self) -> int:
        """Number of actions of one kind."""
        return len(self.stage_rank) * self.num_microbatches

    def durations(self, costs: Sequence[StageCost]) -> list[list[float]]:
        """Seconds (or any one unit) of an action by kind and stage."""
        weight = [cost.backward_weight for cost in costs]
        backward = [cost.backward_input for cost in costs]
        if not self.split_backward:
            backward = [b + w for b, w in zip(backward, weight, strict=True)]
        return [[cost.forward for cost in costs], backward, weight]


Order = list[list[int]]  # by rank: numbers of actions


@dataclass(frozen=True)
class Result:
    """An order, and the step time with the durations for which it was made."""

    order: Order
    step_s: float


def justify(
    actions: Actions,
    order: Order,
    costs: Sequence[StageCost],
    cap: int,
    *,
    passes: int,
    weights_last: bool,
) -> Result:
    """The fastest order that ``passes`` passes find, which alternate between forward and backward.

    ``cap`` is the largest number of chunk-activations that a rank may hold; ``order`` must keep it.
    ``weights_last``: a weight gradient is taken only if nothing else can start; otherwise it is
    taken in its place of the order.
    """
    best: Result | None = None
    for number in range(passes):
        reverse = number % 2 == 1
        if reverse:
            order = [rank[::-1] for rank in order]
        found = _Pass(
            actions, order, costs, cap=cap, reverse=reverse, weights_last=weights_last
        ).result()
        order = [rank[::-1] for rank in found.order] if reverse else found.order
        if best is None or found.step_s < best.step_s:
            best = Result(order, found.step_s)
    assert best is not None
    return best


class _Pass:
    """One pass of list scheduling. In reversed time a weight gradient takes memory, and a forward
    frees it."""

    def __init__(
        self,
        actions: Actions,
        order: Order,
        costs: Sequence[StageCost],
        *,
        cap: int,
        reverse: bool,
        weights_last: bool,
    ) -> None:
        self._actions, self._order, self._costs = actions, order, costs
        self._reverse, self._weights_last = reverse, weights_last
        self._count, self._m = actions.per_kind, actions.num_microbatches
        self._last = len(actions.stage_rank) - 1
        self._duration = actions.durations(costs)
        release = [0, 0, -1] if actions.split_backward else [0, -1, 0]
        change = [release[kind] + (kind == _FORWARD) for kind in range(_COMPUTE_KINDS)]
        self._change = [-step for step in change] if reverse else change
        self._waits = self._predecessors()
        self._ready = [0.0] * (_COMPUTE_KINDS * self._count)
        ranks = range(len(order))
        self._head = [0 for _ in ranks]
        self._done = [bytearray(len(rank)) for rank in order]
        self._room = [cap for _ in ranks]
        self._free = [0.0 for _ in ranks]
        self._taken: Order = [[] for _ in ranks]
        self._events = [(0.0, rank) for rank in ranks]

    def _predecessors(self) -> bytearray:
        """For each action, the number of other ranks' actions and stages that it waits for."""
        count, m, split = self._count, self._m, self._actions.split_backward
        waits = bytearray(_COMPUTE_KINDS * count)
        if self._reverse:
            waits[:count] = b"\x01" * count
            waits[count : count + m] = bytes([split]) * m
            waits[count + m : 2 * count] = bytes([1 + split]) * (count - m)
        else:
            waits[m:] = b"\x01" * (_COMPUTE_KINDS * count - m)
        return waits

    def result(self) -> Result:
        """Run to the end. Raises ValueError if the given order breaks the cap or is not legal."""
        events, free = self._events, self._free
        while events:
            time, rank = heapq.heappop(events)
            if free[rank] <= time:
                place = self._choose(rank, time)
                if place >= 0:
                    self._run(rank, place, time)
        if any(len(taken) < len(given) for taken, given in zip(self._taken, self._order)):  # noqa: B905
            raise ValueError("an order that does not keep its activation cap, or is not legal")
        return Result(self._taken, max(free))

    def _choose(self, rank: int, time: float) -> int:
        """The place in the order of the action that a free rank starts now; -1 if none can
        start."""
        order, done, head = self._order[rank], self._done[rank], self._head[rank]
        end = len(order)
        while head < end and done[head]:
            head += 1
        self._head[rank] = head
        waits, ready, change, count = self._waits, self._ready, self._change, self._count
        room, weights_last, weight = self._room[rank], self._weights_last, -1
        level = highest = 0  # memory of the actions that would be overtaken
        for place in range(head, min(end, head + self._actions.window)):
            if done[place]:
                continue
            action = order[place]
            step = change[action // count]
            if not waits[action] and ready[action] <= time and (step <= 0 or highest < room):
                if not weights_last or action < 2 * count:
                    return place
                if weight < 0:
                    weight = place
            level += step
            if level > highest:
                highest = level
        return weight

    def _run(self, rank: int, place: int, time: float) -> None:
        action = self._order[rank][place]
        kind, slot = divmod(action, self._count)
        stage = slot // self._m
        end = time + self._duration[kind][stage]
        self._done[rank][place] = 1
        self._room[rank] -= self._change[kind]
        self._taken[rank].append(action)
        self._free[rank] = end
        heapq.heappush(self._events, (end, rank))
        follow = self._before if self._reverse else self._after
        for target, stage_there in follow(action, kind, stage):
            self._arrive(target, stage_there, rank, stage, end)

    def _arrive(self, action: int, stage: int, sender: int, source: int, end: float) -> None:
        """Note that an input of an action has arrived, and wake its rank unless it is busy."""
        rank = self._actions.stage_rank[stage]
        if rank != sender:
            end += self._costs[min(stage, source)].transfer
        if end > self._ready[action]:
            self._ready[action] = end
        self._waits[action] -= 1
        if not self._waits[action] and rank != sender and self._free[rank] <= end:
            heapq.heappush(self._events, (self._ready[action], rank))

    def _after(self, action: int, kind: int, stage: int) -> list[tuple[int, int]]:
        """The actions that wait for this one, with their stages."""
        if kind == _FORWARD:
            if stage == self._last:
                return [(action + self._count, stage)]
            return [(action + self._m, stage + 1)]
        if kind == _WEIGHT:
            return []
        follow = [(action + self._count, stage)] if self._actions.split_backward else []
        return [*follow, (action - self._m, stage - 1)] if stage else follow

    def _before(self, action: int, kind: int, stage: int) -> list[tuple[int, int]]:
        """The actions for which this one waits, with their stages; in reversed time they follow."""
        if kind == _FORWARD:
            return [(action - self._m, stage - 1)] if stage else []
        if kind == _WEIGHT:
            return [(action - self._count, stage)]
        if stage == self._last:
            return [(action - self._count, stage)]
        return [(action + self._m, stage + 1)]


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
