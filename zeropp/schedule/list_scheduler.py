"""ZeroPP's list scheduler, which merges the orders of forwards and backwards into one per rank.

Every rank has a fixed order of its forwards and a fixed order of its input gradients. Weight
gradients wait in a queue, in the order of their input gradients. Simulated time runs from event to
event; whenever a rank is free it takes an input gradient or a forward that can start (a forward
only if the activation cap allows it), and a weight gradient where there is neither. An activation
counts from its forward to the end of its weight gradient, so the cap limits both the microbatches
in flight and the delayed weight gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush, heapreplace
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

    Without ``split_backward`` the input gradients are full backwards, and nothing is delayed.
    """

    stage_rank: tuple[int, ...]
    forward: tuple[tuple[Slot, ...], ...]
    backward: tuple[tuple[Slot, ...], ...]
    split_backward: bool = True

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


class _Run:
    """One run of the list scheduler. Lists without another key have an entry per rank.

    ``ready`` says when the input at each of ``Orders.places`` arrives. This is the inner loop of
    every search, so it is one function without objects.
    """

    def __init__(
        self, orders: Orders, costs: Sequence[StageCost], cap: int, policy: Policy
    ) -> None:
        ranks, count = len(orders.forward), orders.num_microbatches
        self._orders, self._cap, self._policy, self._count = orders, cap, policy, count
        self._back = len(orders.stage_rank) * count
        self._ready = [_NEVER] * (2 * self._back + 1)
        self._ready[:count] = [0.0] * count
        self._forwards, self._backwards, self._weights = [0] * ranks, [0] * ranks, [0] * ranks
        self._forward_turn = [False] * ranks
        self._free_at = [0.0] * ranks
        self._kinds: list[list[Op]] = [[] for _ in range(ranks)]
        self._events = [(0.0, rank) for rank in range(ranks)]  # a heap
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
        for rank, order in enumerate(self._orders.backward):
            if self._weights[rank] < len(order):
                raise ValueError(
                    f"activation_cap={self._cap} of pipeline rank {rank} is too small: "
                    f"{len(order) - self._forwards[rank]} forwards can never start"
                )
        return self.planned()

    def planned(self) -> Planned:
        """What has been planned so far."""
        return Planned(self._orders, tuple(self._kinds), max(self._free_at))

    def advance(self, until_s: float) -> None:
        """Begin all actions that can begin until then."""
        events, ready, count, back, cap = (
            self._events,
            self._ready,
            self._count,
            self._back,
            self._cap,
        )
        forwards, backwards, weights = self._forwards, self._backwards, self._weights
        forward_turn, free_at, all_kinds = self._forward_turn, self._free_at, self._kinds
        forward_s, input_s, weight_s, hop_s = (
            self._forward_s,
            self._input_s,
            self._weight_s,
            self._hop_s,
        )
        places, ranks, last = self._orders.places, self._orders.stage_rank, len(self._hop_s)
        alternate, patience = self._policy.alternate, self._policy.patience
        split, never = self._orders.split_backward, 2 * back
        while events and events[0][0] <= until_s:
            time, rank = events[0]  # replaced by the end of the action that begins, if one does
            if free_at[rank] > time:
                heappop(events)
                continue
            forward_places, backward_places = places[rank]
            place, back_place = forward_places[forwards[rank]], backward_places[backwards[rank]]
            forward, backward = ready[place], ready[back_place]
            waits = weights[rank] < backwards[rank]  # whether a weight gradient waits
            turn = forward_turn[rank]
            makes_room = False
            if forwards[rank] - weights[rank] >= cap:
                forward = _NEVER
                makes_room = turn and waits and place != never
            if not makes_room and backward <= time and not (turn and forward <= time):
                stage = (back_place - back) // count
                backwards[rank] += 1
                forward_turn[rank] = alternate
                weights[rank] += not split
                all_kinds[rank].append(Op.BACKWARD_INPUT if split else Op.FULL_BACKWARD)
                end = time + input_s[stage]
                if not split:
                    end += weight_s[stage]
                # Where the output goes, if it goes to another stage, and when it is there.
                to, target = stage - 1, back_place - count
                arrival = end + hop_s[to] if stage else _NEVER
            elif not makes_room and forward <= time:
                stage = place // count
                forwards[rank] += 1
                forward_turn[rank] = False
                all_kinds[rank].append(Op.FORWARD)
                end = time + forward_s[stage]
                to, target = stage + 1, place + count
                if stage < last:
                    arrival = end + hop_s[stage]
                else:
                    ready[place + back], arrival = end, _NEVER
            elif waits:
                stage = (backward_places[weights[rank]] - back) // count
                idle_s = min(backward, forward) - time
                if not makes_room and patience and idle_s <= patience * weight_s[stage]:
                    heappop(events)
                    continue
                weights[rank] += 1
                all_kinds[rank].append(Op.BACKWARD_WEIGHT)
                end = time + weight_s[stage]
                arrival = _NEVER
            else:
                heappop(events)
                continue
            free_at[rank] = end
            heapreplace(events, (end, rank))
            if arrival < _NEVER:
                # A rank that is busy then needs no waking: it looks for work when it is done.
                ready[target] = arrival
                receiver = ranks[to]
                if receiver != rank and arrival > free_at[receiver]:
                    heappush(events, (arrival, receiver))
