"""The bytes that a pipeline rank holds while its program runs.

They follow from the plan's programs and from the bytes of its stages (``zeropp.cost.plan_price``).
An action allocates when it is issued and frees when it has ended, so the peak depends only on the
order of actions; durations say when the bytes are held.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from zeropp.cost.plan_price import PlanPrice
from zeropp.plan import MemoryBytes, Plan
from zeropp.schedule.action import Op
from zeropp.sim.rank_memory import RankMemory


class Change(NamedTuple):
    """The bytes that a rank holds at one action, in addition to those that are always held."""

    place: int  # index of the action in the program
    grew: bool  # true: held from the action's start on; false: from its end on
    unsharded: int
    gradients: int  # without those that are always held
    activations: int
    workspace: int

    @property
    def total(self) -> int:
        """The sum of these bytes."""
        return self.unsharded + self.gradients + self.activations + self.workspace


def peak_memory(plan: Plan, price: PlanPrice) -> tuple[MemoryBytes, ...]:
    """Bytes by kind at the peak of every pipeline rank."""
    return tuple(rank_peak(plan, price, rank) for rank in range(plan.schedule.num_ranks))


def rank_peak(plan: Plan, price: PlanPrice, rank: int) -> MemoryBytes:
    """Bytes by kind at the peak of one pipeline rank."""
    most, fullest = -1, _EMPTY
    for change in _changes(plan, price, rank):
        total = change[2] + change[3] + change[4] + change[5]
        if total > most:
            most, fullest = total, change
    return as_memory(plan, price, rank, Change._make(fullest))


def fits(plan: Plan, price: PlanPrice, rank: int, limit: int) -> bool:
    """Whether one pipeline rank never holds more than ``limit`` bytes."""
    room = limit - as_memory(plan, price, rank, Change._make(_EMPTY)).total
    return all(c[2] + c[3] + c[4] + c[5] <= room for c in _changes(plan, price, rank))


def as_memory(plan: Plan, price: PlanPrice, rank: int, change: Change) -> MemoryBytes:
    """All bytes of a rank at one change, with those that are always held."""
    stages = [price.memory[s] for s in plan.schedule.stages_of(rank)]
    resident = sum(m.gradients for m in stages) if price.resident_gradients else 0
    return MemoryBytes(
        parameters=sum(m.parameters for m in stages),
        unsharded=change.unsharded,
        gradients=resident + change.gradients,
        optimizer=sum(m.optimizer for m in stages),
        activations=sum(m.buffers for m in stages) + change.activations,
        workspace=change.workspace,
    )


def walk(plan: Plan, price: PlanPrice, rank: int) -> Iterator[Change]:
    """The changes of a rank: for every action that changes memory, its fullest moment and what it
    leaves."""
    return map(Change._make, _changes(plan, price, rank))


def _changes(plan: Plan, price: PlanPrice, rank: int) -> Iterator[_Change]:
    """The fields of every ``Change`` as plain tuples, because a search reads millions of them."""
    state = RankMemory(plan, price, rank)
    handlers = state.handlers
    yield _EMPTY
    for index, (stage, op, _) in enumerate(plan.schedule.programs[rank]):
        run = handlers.get(op)
        if run is None:
            continue
        moment = run(stage)
        if moment is not None:
            yield (index, True, state.unsharded, *moment)
        yield (
            index, op in GROWING, state.unsharded, state.gradients, state.activations, state.copy
        )  # fmt: skip
    flat = sum(price.memory[s].flat_gradients for s in plan.schedule.stages_of(rank))
    if flat:
        yield index, False, state.unsharded, state.gradients, state.activations, flat


_Change = tuple[int, bool, int, int, int, int]
_EMPTY: _Change = (0, True, 0, 0, 0, 0)
GROWING = frozenset({Op.UNSHARD, Op.RECV_F, Op.RECV_B})
