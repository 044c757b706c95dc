"""Closes the gaps of an order at both ends of a step, without ever exceeding the activation cap.

The input is a legal order of every rank's actions that was made for the middle of a step, where a
pattern repeats. A forward pass runs it as a list scheduler: a rank whose next action cannot start
yet takes the first later one that can, if memory allows. This fills the start of the step. A
backward pass does the same in reversed time, from the last action to the first. This fills the end
of the step with delayed weight gradients. Passes alternate, and each may improve on the one before
(in project scheduling this is known as forward-backward improvement, or justification: Tormos and
Lova, Annals of Operations Research 102, 2001).

No pass can deadlock or break the cap, because an action is moved before others only if the order
that remains, with that action at its front, still keeps the cap everywhere.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from zeropp.schedule.program import StageCost

_FORWARD, _BACKWARD, _WEIGHT = range(3)
_KINDS = 3


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
        change = [release[kind] + (kind == _FORWARD) for kind in range(_KINDS)]
        self._change = [-step for step in change] if reverse else change
        self._waits = self._predecessors()
        self._ready = [0.0] * (_KINDS * self._count)
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
        waits = bytearray(_KINDS * count)
        if self._reverse:
            waits[:count] = b"\x01" * count
            waits[count : count + m] = bytes([split]) * m
            waits[count + m : 2 * count] = bytes([1 + split]) * (count - m)
        else:
            waits[m:] = b"\x01" * (_KINDS * count - m)
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
