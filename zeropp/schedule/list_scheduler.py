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
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from zeropp.schedule.program import Action, Op, RankProgram, StageCost

Slot = tuple[int, int]  # stage, microbatch

_NEVER = float("inf")


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

    Weight gradients may run in groups: ``groups`` has for each of a rank, in their order, how many
    are done after its group; empty: each is alone. Without ``split_backward`` they are not delayed:
    a group follows the last of its input gradients, and without groups the two are one action.
    """

    stage_rank: tuple[int, ...]
    forward: tuple[tuple[Slot, ...], ...]
    backward: tuple[tuple[Slot, ...], ...]
    split_backward: bool = True
    groups: tuple[int, ...] = ()

    @property
    def num_microbatches(self) -> int:
        """One more than the largest number of a microbatch."""
        return 1 + max((j for _, j in self.forward[0]), default=0)

    @cached_property
    def places(self) -> tuple[tuple[list[int], list[int]], ...]:
        """Each rank's forwards and backwards as places of their inputs in one table: those of
        forwards at ``stage * microbatches + microbatch``, then those of backwards, then that of an
        input that never arrives, with which every order ends."""
        count = self.num_microbatches
        back = len(self.stage_rank) * count
        return tuple(
            (
                [*(stage * count + j for stage, j in forward), 2 * back],
                [*(back + stage * count + j for stage, j in backward), 2 * back],
            )
            for forward, backward in zip(self.forward, self.backward, strict=True)
        )


@dataclass(frozen=True)
class Planned:
    """The result: for every rank the kinds of its actions in turn (which action of a kind comes
    next is known from ``orders``), and when the last rank ends, in the unit of the costs."""

    orders: Orders
    kinds: tuple[Sequence[Op], ...]
    step_s: float

    def programs(self) -> tuple[RankProgram, ...]:
        """One program per rank."""
        programs = []
        ranks = zip(self.orders.forward, self.orders.backward, self.kinds, strict=True)
        for forward, backward, kinds in ranks:
            slots = {
                Op.FORWARD: iter(forward),
                Op.BACKWARD_INPUT: iter(backward),
                Op.BACKWARD_WEIGHT: iter(backward),
                Op.FULL_BACKWARD: iter(backward),
            }
            programs.append(tuple(Action(s, op, j) for op in kinds for s, j in [next(slots[op])]))
        return tuple(programs)


def list_schedule(orders: Orders, costs: Sequence[StageCost], cap: int, policy: Policy) -> Planned:
    """Schedule all work with at most ``cap`` live chunk-activations per rank.

    ``costs`` are durations, one per stage. Raises ValueError where the cap is so small that the
    orders can never finish.
    """
    return _Run(orders, costs, cap, policy).result()


def beginning(
    orders: Orders, costs: Sequence[StageCost], cap: int, policy: Policy, *, until_s: float
) -> Planned:
    """The actions that ``list_schedule`` begins no later than ``until_s``."""
    run = _Run(orders, costs, cap, policy)
    run.advance(until_s)
    return run.planned()


class _RankState:
    """How far one rank has come in each of its orders (``Orders.places``), and until when it is
    busy."""

    __slots__ = (
        "backward",
        "backwards",
        "forward",
        "forward_turn",
        "forwards",
        "free_at",
        "kinds",
        "weights",
    )

    def __init__(self, forward: list[int], backward: list[int]) -> None:
        self.forward, self.backward = forward, backward
        self.forwards = self.backwards = self.weights = 0  # done so far
        self.forward_turn = False
        self.free_at = 0.0
        self.kinds: list[Op] = []


class _Run:
    """One run of the list scheduler. ``_ready`` says when the input at each of ``Orders.places``
    arrives."""

    def __init__(
        self, orders: Orders, costs: Sequence[StageCost], cap: int, policy: Policy
    ) -> None:
        self._orders, self._cap, self._policy = orders, cap, policy
        self._count = orders.num_microbatches
        self._back = len(orders.stage_rank) * self._count
        self._never = 2 * self._back
        groups = orders.groups or range(1, len(orders.backward[0]) + 1)
        self._groups = [*groups, self._never]  # there is none behind the last one
        self._ready = [_NEVER] * (self._never + 1)
        self._ready[: self._count] = [0.0] * self._count
        self._ranks = [_RankState(forward, backward) for forward, backward in orders.places]
        self._events = [(0.0, rank) for rank in range(len(self._ranks))]  # a heap
        self._forward_s = [cost.forward for cost in costs]
        self._weight_s = [cost.backward_weight for cost in costs]
        self._input_s = [cost.backward_input for cost in costs]
        # Seconds from a stage's output to its arrival at the next stage, in either direction.
        self._hop_s = [
            0.0 if here == there else cost.transfer
            for cost, (here, there) in zip(costs, pairwise(orders.stage_rank), strict=False)
        ]

    def result(self) -> Planned:
        """Run to the end. Raises ValueError if the cap is too small."""
        self.advance(_NEVER)
        for rank, state in enumerate(self._ranks):
            if state.weights < len(state.backward) - 1:
                raise ValueError(
                    f"activation_cap={self._cap} of pipeline rank {rank} is too small: "
                    f"{len(state.forward) - 1 - state.forwards} forwards can never start"
                )
        return self.planned()

    def planned(self) -> Planned:
        """What has been planned so far."""
        return Planned(
            self._orders,
            tuple(state.kinds for state in self._ranks),
            max(state.free_at for state in self._ranks),
        )

    def advance(self, until_s: float) -> None:
        """Begin all actions that can begin until then."""
        events, ranks, ready, cap = self._events, self._ranks, self._ready, self._cap
        while events and events[0][0] <= until_s:
            time, rank = events[0]  # replaced by the end of the action that begins, if one does
            state = ranks[rank]
            if state.free_at > time:
                heapq.heappop(events)
                continue
            place = state.forward[state.forwards]
            forward, backward = ready[place], ready[state.backward[state.backwards]]
            waits = self._groups[state.weights] <= state.backwards  # whether a group waits
            if state.forwards - state.weights >= cap:
                forward = _NEVER
                if state.forward_turn and waits and place != self._never:
                    self._run_weight(rank, state, time)
                    continue
            if backward <= time and not (state.forward_turn and forward <= time):
                self._run_backward(rank, state, time)
            elif forward <= time:
                self._run_forward(rank, state, time)
            elif waits and self._is_worth_it(state, min(backward, forward) - time):
                self._run_weight(rank, state, time)
            else:
                heapq.heappop(events)

    def _is_worth_it(self, state: _RankState, idle_s: float) -> bool:
        """Whether to start a weight gradient if other work is due in ``idle_s``."""
        if not self._policy.patience:
            return True
        stage = (state.backward[state.weights] - self._back) // self._count
        return idle_s > self._policy.patience * self._weight_s[stage]

    def _run_forward(self, rank: int, state: _RankState, time: float) -> None:
        place = state.forward[state.forwards]
        stage = place // self._count
        state.forwards += 1
        state.forward_turn = False
        state.kinds.append(Op.FORWARD)
        end = state.free_at = time + self._forward_s[stage]
        heapq.heapreplace(self._events, (end, rank))
        if stage < len(self._hop_s):
            self._send(rank, stage + 1, place + self._count, end + self._hop_s[stage])
        else:
            self._ready[place + self._back] = end

    def _run_backward(self, rank: int, state: _RankState, time: float) -> None:
        place = state.backward[state.backwards]
        stage = (place - self._back) // self._count
        state.backwards += 1
        state.forward_turn = self._policy.alternate
        sent = end = time + self._input_s[stage]
        if self._orders.split_backward or self._orders.groups:
            state.kinds.append(Op.BACKWARD_INPUT)
            if not self._orders.split_backward and self._groups[state.weights] == state.backwards:
                end = self._add_weights(state, end)
        else:
            state.kinds.append(Op.FULL_BACKWARD)
            state.weights += 1
            sent = end = end + self._weight_s[stage]
        state.free_at = end
        heapq.heapreplace(self._events, (end, rank))
        if stage > 0:
            self._send(rank, stage - 1, place - self._count, sent + self._hop_s[stage - 1])

    def _run_weight(self, rank: int, state: _RankState, time: float) -> None:
        end = state.free_at = self._add_weights(state, time)
        heapq.heapreplace(self._events, (end, rank))

    def _add_weights(self, state: _RankState, time: float) -> float:
        """Plan the next group of weight gradients; returns its end."""
        stage = (state.backward[state.weights] - self._back) // self._count
        count = self._groups[state.weights] - state.weights
        state.weights += count
        state.kinds += [Op.BACKWARD_WEIGHT] * count
        end: float = time + count * self._weight_s[stage]
        return end

    def _send(self, sender: int, stage: int, place: int, arrival: float) -> None:
        """Note when an output arrives at a stage, and wake that rank then. A rank that is busy at
        that time needs no waking: it looks for work when it is done."""
        self._ready[place] = arrival
        rank = self._orders.stage_rank[stage]
        if rank != sender and arrival > self._ranks[rank].free_at:
            heapq.heappush(self._events, (arrival, rank))
