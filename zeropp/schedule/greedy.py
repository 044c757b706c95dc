"""A list scheduler for split-backward pipelines: ZeroPP's generator and the zero-bubble ones.

Every rank has a fixed order of forwards and of input gradients; weight gradients queue up in the
order in which the input gradients made them possible. Time runs; whenever a rank is free it takes
the first that can start of: input gradient, forward (if the activation cap allows), weight
gradient. An activation counts from its forward to its weight gradient, so the cap bounds both
the microbatches in flight and the weight gradients put off.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from zeropp.schedule.action import Action, Op
from zeropp.schedule.program import Program, StageCost

_ARRIVAL, _WAKE = 0, 1  # at equal times a message arrives before a rank looks for it

Slot = tuple[int, int]  # stage, microbatch


@dataclass(frozen=True)
class Orders:
    """What each rank may run: forwards and input gradients, each in this order."""

    stage_rank: tuple[int, ...]
    forward: tuple[tuple[Slot, ...], ...]
    backward: tuple[tuple[Slot, ...], ...]


def list_schedule(
    orders: Orders, costs: Sequence[StageCost], caps: Sequence[int], patience: float = 0.0
) -> tuple[Program, ...]:
    """Programs of all ranks for one cap (live chunk-activations) a rank.

    ``patience``: a rank puts off a weight gradient if a message that it can work on is due within
    this share of the weight gradient's duration; 0 starts it at once. Raises ValueError where a
    cap is too small for the orders ever to finish.
    """
    return _Run(orders, costs, caps, patience).programs()


class _Rank:
    """State of one rank while time runs."""

    def __init__(self, forward: Sequence[Slot], backward: Sequence[Slot], cap: int) -> None:
        self.forward, self.backward = deque(forward), deque(backward)
        self.weight: deque[Slot] = deque()
        self.cap = cap
        self.live = 0
        self.free_at = 0.0
        self.program: list[Action] = []


class _Run:
    def __init__(
        self, orders: Orders, costs: Sequence[StageCost], caps: Sequence[int], patience: float
    ) -> None:
        self._costs, self._patience = costs, patience
        self._stage_rank = orders.stage_rank
        self._last = len(orders.stage_rank) - 1
        self._ranks = [
            _Rank(forward, backward, cap)
            for forward, backward, cap in zip(orders.forward, orders.backward, caps, strict=True)
        ]
        # Time at which the input of (stage, microbatch) is there; absent while it is unknown.
        self._forward_ready = {
            (0, j): 0.0 for s, j in orders.forward[orders.stage_rank[0]] if s == 0
        }
        self._backward_ready: dict[Slot, float] = {}
        self._events: list[tuple[float, int, int]] = []

    def programs(self) -> tuple[Program, ...]:
        for rank in range(len(self._ranks)):
            heapq.heappush(self._events, (0.0, _WAKE, rank))
        while self._events:
            time, _, rank = heapq.heappop(self._events)
            if self._ranks[rank].free_at <= time:
                self._choose(rank, time)
        for rank, state in enumerate(self._ranks):
            if state.forward or state.backward or state.weight:
                raise ValueError(
                    f"activation_cap={state.cap} of pipeline rank {rank} is too small: "
                    f"{len(state.forward)} forwards can never start"
                )
        return tuple(tuple(state.program) for state in self._ranks)

    def _choose(self, rank: int, time: float) -> None:
        state = self._ranks[rank]
        if state.backward and self._backward_ready.get(state.backward[0], _NEVER) <= time:
            self._run_backward(rank, time)
        elif (
            state.forward
            and state.live < state.cap
            and self._forward_ready.get(state.forward[0], _NEVER) <= time
        ):
            self._run_forward(rank, time)
        elif state.weight:
            soon = self._next_arrival(state)
            stage = state.weight[0][0]
            if soon - time > self._patience * self._costs[stage].backward_weight:
                self._run_weight(rank, time)

    def _next_arrival(self, state: _Rank) -> float:
        """When the rank's next message is known to be due; infinite where none is on its way."""
        due = self._backward_ready.get(state.backward[0], _NEVER) if state.backward else _NEVER
        if state.forward and state.live < state.cap:
            due = min(due, self._forward_ready.get(state.forward[0], _NEVER))
        return due

    def _run_forward(self, rank: int, time: float) -> None:
        state = self._ranks[rank]
        stage, microbatch = state.forward.popleft()
        state.live += 1
        end = self._occupy(rank, time, stage, Op.FORWARD, microbatch, self._costs[stage].forward)
        if stage == self._last:
            self._announce(self._backward_ready, (stage, microbatch), end, rank)
        else:
            self._send(self._forward_ready, stage, stage + 1, microbatch, end)

    def _run_backward(self, rank: int, time: float) -> None:
        state = self._ranks[rank]
        stage, microbatch = state.backward.popleft()
        duration = self._costs[stage].backward_input
        end = self._occupy(rank, time, stage, Op.BACKWARD_INPUT, microbatch, duration)
        state.weight.append((stage, microbatch))
        if stage > 0:
            self._send(self._backward_ready, stage, stage - 1, microbatch, end)

    def _run_weight(self, rank: int, time: float) -> None:
        state = self._ranks[rank]
        stage, microbatch = state.weight.popleft()
        state.live -= 1
        duration = self._costs[stage].backward_weight
        self._occupy(rank, time, stage, Op.BACKWARD_WEIGHT, microbatch, duration)

    def _occupy(
        self, rank: int, time: float, stage: int, op: Op, microbatch: int, duration: float
    ) -> float:
        state = self._ranks[rank]
        state.program.append(Action(stage, op, microbatch))
        state.free_at = time + duration
        heapq.heappush(self._events, (state.free_at, _WAKE, rank))
        return state.free_at

    def _send(
        self, ready: dict[Slot, float], source: int, target: int, microbatch: int, end: float
    ) -> None:
        rank = self._stage_rank[target]
        local = rank == self._stage_rank[source]
        arrival = end if local else end + self._costs[source].transfer
        self._announce(ready, (target, microbatch), arrival, rank)

    def _announce(self, ready: dict[Slot, float], slot: Slot, time: float, rank: int) -> None:
        ready[slot] = time
        heapq.heappush(self._events, (time, _ARRIVAL, rank))


_NEVER = float("inf")
