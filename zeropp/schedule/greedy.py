"""ZeroPP's list scheduler: orders of forwards and input gradients in, programs out.

Every rank has a fixed order of forwards and of input gradients; weight gradients queue up in the
order in which the input gradients made them possible. Time runs; whenever a rank is free it takes
an input gradient or a forward (if the activation cap allows) that can start, and a weight
gradient where there is neither. An activation counts from its forward to its weight gradient, so
the cap bounds both the microbatches in flight and the weight gradients put off.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from zeropp.schedule.action import Action, Op
from zeropp.schedule.program import Program, StageCost

Slot = tuple[int, int]  # stage, microbatch

_NEVER = float("inf")
_END = (-1, -1)  # stands behind the last slot of an order, and is never ready


@dataclass(frozen=True)
class Policy:
    """How a rank chooses. No policy is best for all sizes, so a planner tries several.

    ``alternate``: an input gradient is followed by a forward, where there is one that can start;
    if the cap forbids it, first by a weight gradient that makes room for it. So the next unit gets
    through while this one's input gradients are at hand (which else go first, always).
    ``patience``: put off a weight gradient if work from another rank is due within this share of
    its duration; 0 starts it at once.
    """

    alternate: bool = False
    patience: float = 0.0


@dataclass(frozen=True)
class Orders:
    """What each rank may run: forwards and input gradients, each in this order.

    Without ``split_backward`` the input gradients are full backwards, and there is nothing to put
    off.
    """

    stage_rank: tuple[int, ...]
    forward: tuple[tuple[Slot, ...], ...]
    backward: tuple[tuple[Slot, ...], ...]
    split_backward: bool = True


@dataclass(frozen=True)
class Planned:
    """What the ranks take up one after the other, by kind, and when the last rank ends on the
    costs planned with."""

    orders: Orders
    kinds: tuple[Sequence[Op], ...]
    step_s: float

    def programs(self) -> tuple[Program, ...]:
        """One program a rank."""
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
    """An order of every rank's work with at most ``cap`` live chunk-activations a rank.

    Raises ValueError where the cap is too small for the orders ever to finish.
    """
    return _Run(orders, costs, cap, policy).result()


class _Rank:
    """State of one rank while time runs: how far it is in each of its orders."""

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
        # Time at which an input is there, by stage and microbatch; the last row is that of _END.
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
        """Say when a slot's input will be there; a rank that is busy until then looks anyway."""
        rank = self._stage_rank[target]
        receiver = self._ranks[rank]
        arrival = sender.free_at
        if receiver is not sender:
            arrival += self._costs[min(source, target)].transfer
        ready[target][microbatch] = arrival
        if arrival > receiver.free_at:
            heapq.heappush(self._events, (arrival, rank))
