"""A list scheduler for split-backward pipelines: ZeroPP's generator and the zero-bubble ones.

Every rank has a fixed order of forwards and of input gradients; weight gradients queue up in the
order in which the input gradients made them possible. Time runs; whenever a rank is free it takes
an input gradient or a forward (if the activation cap allows) that can start, and a weight
gradient where there is neither. An activation counts from its forward to its weight gradient, so
the cap bounds both the microbatches in flight and the weight gradients put off.
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
class Policy:
    """How a rank chooses. No policy is best for all sizes, so a planner tries several.

    ``alternate``: where both could start, take a forward after an input gradient and the reverse
    (else always the input gradient). ``patience``: put off a weight gradient if work from another
    rank is due within this share of its duration; 0 starts it at once.
    """

    alternate: bool = False
    patience: float = 0.0


@dataclass(frozen=True)
class Orders:
    """What each rank may run: forwards and input gradients, each in this order."""

    stage_rank: tuple[int, ...]
    forward: tuple[tuple[Slot, ...], ...]
    backward: tuple[tuple[Slot, ...], ...]


@dataclass(frozen=True)
class Planned:
    """Programs of all ranks, and when the last rank ends on the costs planned with."""

    programs: tuple[Program, ...]
    step_s: float


def list_schedule(
    orders: Orders, costs: Sequence[StageCost], caps: Sequence[int], policy: Policy
) -> Planned:
    """Programs of all ranks for one cap (live chunk-activations) a rank.

    Raises ValueError where a cap is too small for the orders ever to finish.
    """
    return _Run(orders, costs, caps, policy).result()


class _Rank:
    """State of one rank while time runs."""

    def __init__(self, forward: Sequence[Slot], backward: Sequence[Slot], cap: int) -> None:
        self.forward, self.backward = deque(forward), deque(backward)
        self.weight: deque[Slot] = deque()
        self.cap = cap
        self.live = 0
        self.free_at = 0.0
        self.forward_turn = False
        self.program: list[Action] = []


class _Run:
    def __init__(
        self, orders: Orders, costs: Sequence[StageCost], caps: Sequence[int], policy: Policy
    ) -> None:
        self._costs, self._policy = costs, policy
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

    def result(self) -> Planned:
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
        programs = tuple(tuple(state.program) for state in self._ranks)
        return Planned(programs, max(state.free_at for state in self._ranks))

    def _choose(self, rank: int, time: float) -> None:
        state = self._ranks[rank]
        backward, forward = self._due(state)
        if backward <= time and not (state.forward_turn and forward <= time):
            self._run_backward(rank, time)
        elif forward <= time:
            self._run_forward(rank, time)
        elif state.weight:
            duration = self._costs[state.weight[0][0]].backward_weight
            if min(backward, forward) - time > self._policy.patience * duration:
                self._run_weight(rank, time)

    def _due(self, state: _Rank) -> tuple[float, float]:
        """When the next input gradient and the next forward can start; infinite if unknown."""
        backward = forward = _NEVER
        if state.backward:
            backward = self._backward_ready.get(state.backward[0], _NEVER)
        if state.forward and state.live < state.cap:
            forward = self._forward_ready.get(state.forward[0], _NEVER)
        return backward, forward

    def _run_forward(self, rank: int, time: float) -> None:
        state = self._ranks[rank]
        stage, microbatch = state.forward.popleft()
        state.live += 1
        state.forward_turn = False
        end = self._occupy(rank, time, stage, Op.FORWARD, microbatch, self._costs[stage].forward)
        if stage == self._last:
            self._announce(self._backward_ready, (stage, microbatch), end, rank)
        else:
            self._send(self._forward_ready, stage, stage + 1, microbatch, end)

    def _run_backward(self, rank: int, time: float) -> None:
        state = self._ranks[rank]
        stage, microbatch = state.backward.popleft()
        state.forward_turn = self._policy.alternate
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
