"""ZeroPP's list scheduler, which merges the orders of forwards and backwards into one per rank.

Every rank has a fixed order of its forwards and a fixed order of its input gradients. Weight
gradients wait in a queue, in the order of their input gradients. Simulated time runs from event to
event; whenever a rank is free it takes an input gradient or a forward that can start (a forward
only if the activation cap allows it), and a weight gradient where there is neither. An activation
counts from its forward to the end of its weight gradient, so the cap limits both the microbatches
in flight and the delayed weight gradients.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from zeropp.schedule.action import Action, Op
from zeropp.schedule.program import Program, StageCost

Slot = tuple[int, int]  # stage, microbatch

_NEVER = float("inf")
_END = (-1, -1)  # marks the end of an order; its input never arrives


@dataclass(frozen=True)
class Policy:
    """How a rank chooses between several actions that could start. No policy is best for all
    sizes, so a planner tries several.

    Without ``alternate`` an input gradient always goes before a forward. With it, an input gradient
    is followed by a forward if one can start (if the cap forbids it, by a weight gradient first,
    which makes room), so that the next unit advances while this one is still in its backward.
    ``patience``: a weight gradient is not started if other work is due within this share of its
    duration; with 0 it is started at once.
    """

    alternate: bool = False
    patience: float = 0.0


@dataclass(frozen=True)
class Orders:
    """The order of every rank's forwards and of its input gradients.

    Without ``split_backward`` the input gradients are full backwards, and nothing is delayed.
    """

    stage_rank: tuple[int, ...]
    forward: tuple[tuple[Slot, ...], ...]
    backward: tuple[tuple[Slot, ...], ...]
    split_backward: bool = True


@dataclass(frozen=True)
class Planned:
    """The result: for every rank the kinds of its actions in turn (which action of a kind comes
    next is known from ``orders``), and when the last rank ends, in the unit of the costs."""

    orders: Orders
    kinds: tuple[Sequence[Op], ...]
    step_s: float

    def programs(self) -> tuple[Program, ...]:
        """One program per rank."""
        return tuple(
            tuple(_merge(forward, backward, kinds))
            for forward, backward, kinds in zip(
                self.orders.forward, self.orders.backward, self.kinds, strict=True
            )
        )


def _merge(
    forward: Sequence[Slot], backward: Sequence[Slot], kinds: Sequence[Op]
) -> Iterator[Action]:
    slots = {
        Op.FORWARD: iter(forward),
        Op.BACKWARD_INPUT: iter(backward),
        Op.BACKWARD_WEIGHT: iter(backward),
        Op.FULL_BACKWARD: iter(backward),
    }
    for op in kinds:
        stage, microbatch = next(slots[op])
        yield Action(stage, op, microbatch)


def list_schedule(orders: Orders, costs: Sequence[StageCost], cap: int, policy: Policy) -> Planned:
    """Schedule all work with at most ``cap`` live chunk-activations per rank.

    ``costs`` are durations, one per stage. Raises ValueError where the cap is so small that the
    orders can never finish.
    """
    return _Run(orders, costs, cap, policy).result()


class _Rank:
    """How far one rank has come in each of its orders, and until when it is busy."""

    def __init__(self, forward: Sequence[Slot], backward: Sequence[Slot]) -> None:
        self.forward, self.backward = (*forward, _END), (*backward, _END)
        self.forwards = self.backwards = self.weights = 0  # done so far
        self.forward_turn = False
        self.free_at = 0.0
        self.kinds: list[Op] = []


class _Run:
    def __init__(
        self, orders: Orders, costs: Sequence[StageCost], cap: int, policy: Policy
    ) -> None:
        self._orders, self._costs, self._cap, self._policy = orders, costs, cap, policy
        self._stage_rank = orders.stage_rank
        self._last = len(orders.stage_rank) - 1
        pairs = zip(orders.forward, orders.backward, strict=True)
        self._ranks = [_Rank(forward, backward) for forward, backward in pairs]
        # When the input of each stage and microbatch arrives; the last row belongs to _END.
        count = 1 + max((j for _, j in orders.forward[0]), default=0)
        rows = len(orders.stage_rank) + 1
        self._forward_ready = [[_NEVER] * count for _ in range(rows)]
        self._backward_ready = [[_NEVER] * count for _ in range(rows)]
        self._forward_ready[0] = [0.0] * count
        self._events = [(0.0, rank) for rank in range(len(self._ranks))]  # a heap

    def result(self) -> Planned:
        while self._events:
            time, rank = heapq.heappop(self._events)
            state = self._ranks[rank]
            if state.free_at <= time:
                self._choose(rank, state, time)
        for rank, state in enumerate(self._ranks):
            if state.weights < len(state.backward) - 1:
                raise ValueError(
                    f"activation_cap={self._cap} of pipeline rank {rank} is too small: "
                    f"{len(state.forward) - 1 - state.forwards} forwards can never start"
                )
        kinds = tuple(state.kinds for state in self._ranks)
        return Planned(self._orders, kinds, max(state.free_at for state in self._ranks))

    def _choose(self, rank: int, state: _Rank, time: float) -> None:
        stage, microbatch = state.backward[state.backwards]
        backward = self._backward_ready[stage][microbatch]
        stage, microbatch = state.forward[state.forwards]
        forward = self._forward_ready[stage][microbatch]
        waits = state.weights < state.backwards  # a weight gradient does
        if state.forwards - state.weights >= self._cap:
            forward = _NEVER
            if state.forward_turn and waits and stage >= 0:
                self._run_weight(rank, state, time)
                return
        if backward <= time and not (state.forward_turn and forward <= time):
            self._run_backward(rank, state, time)
        elif forward <= time:
            self._run_forward(rank, state, time)
        elif waits:
            duration = self._costs[state.backward[state.weights][0]].backward_weight
            if min(backward, forward) - time > self._policy.patience * duration:
                self._run_weight(rank, state, time)

    def _run_forward(self, rank: int, state: _Rank, time: float) -> None:
        stage, microbatch = state.forward[state.forwards]
        state.forwards += 1
        state.forward_turn = False
        self._occupy(rank, state, Op.FORWARD, time + self._costs[stage].forward)
        if stage == self._last:
            self._backward_ready[stage][microbatch] = state.free_at
        else:
            self._send(self._forward_ready, state, stage, stage + 1, microbatch)

    def _run_backward(self, rank: int, state: _Rank, time: float) -> None:
        stage, microbatch = state.backward[state.backwards]
        state.backwards += 1
        state.forward_turn = self._policy.alternate
        end = time + self._costs[stage].backward_input
        if self._orders.split_backward:
            self._occupy(rank, state, Op.BACKWARD_INPUT, end)
        else:
            state.weights += 1
            end += self._costs[stage].backward_weight
            self._occupy(rank, state, Op.FULL_BACKWARD, end)
        if stage > 0:
            self._send(self._backward_ready, state, stage, stage - 1, microbatch)

    def _run_weight(self, rank: int, state: _Rank, time: float) -> None:
        stage, _ = state.backward[state.weights]
        state.weights += 1
        self._occupy(rank, state, Op.BACKWARD_WEIGHT, time + self._costs[stage].backward_weight)

    def _occupy(self, rank: int, state: _Rank, op: Op, end: float) -> None:
        state.kinds.append(op)
        state.free_at = end
        heapq.heappush(self._events, (end, rank))

    def _send(
        self,
        ready: list[list[float]],
        sender: _Rank,
        source: int,
        target: int,
        microbatch: int,
    ) -> None:
        """Note when an output arrives at the next stage, and wake that rank then. A rank that is
        busy at that time needs no waking: it looks for work when it is done."""
        rank = self._stage_rank[target]
        receiver = self._ranks[rank]
        arrival = sender.free_at
        if receiver is not sender:
            arrival += self._costs[min(source, target)].transfer
        ready[target][microbatch] = arrival
        if arrival > receiver.free_at:
            heapq.heappush(self._events, (arrival, rank))
