"""Bytes that live on a pipeline rank while its program runs, in the order of the program.

Fed by a plan's programs and the bytes of its stages (``zeropp.cost.price``). An action allocates
when it is issued and frees when it has ended, so the peak depends on the order alone and not on
durations; durations only place the curve in time.
"""

from __future__ import annotations

from collections.abc import Iterator

from zeropp.cost.price import PlanPrice
from zeropp.plan import MemoryBytes, Plan
from zeropp.schedule.action import MAKES_GRADIENTS, Op

Change = tuple[int, bool, int, int, int]


def peak_memory(plan: Plan, price: PlanPrice) -> tuple[MemoryBytes, ...]:
    """Bytes by kind at the peak of every pipeline rank."""
    peaks = []
    for rank in range(plan.schedule.num_ranks):
        changes = walk(plan, price, rank)
        peaks.append(as_memory(plan, price, rank, max(changes, key=lambda c: c[2] + c[3] + c[4])))
    return tuple(peaks)


def as_memory(plan: Plan, price: PlanPrice, rank: int, change: Change) -> MemoryBytes:
    """All bytes of a rank at one change: what is resident all the time, and what moves."""
    stages = [price.memory[s] for s in plan.schedule.stages_of(rank)]
    _, _, unsharded, pending, activations = change
    return MemoryBytes(
        parameters=sum(m.parameters for m in stages),
        unsharded=unsharded,
        gradients=sum(m.gradients for m in stages) + pending,
        optimizer=sum(m.optimizer for m in stages),
        activations=activations,
        workspace=price.workspace[rank],
    )


def walk(plan: Plan, price: PlanPrice, rank: int) -> Iterator[Change]:
    """(index of the action, whether it grew, bytes of gathered parameters, of gradients that
    await their reduction, of activations), at every change and before the first."""
    moves = _moves(plan, price, rank)
    unsharded = pending = activations = buffer = 0
    unreduced: set[int] = set()
    yield 0, True, 0, 0, 0
    for index, action in enumerate(plan.schedule.programs[rank]):
        op, stage = action.op, action.stage
        if op is Op.UNSHARD:
            unsharded += price.memory[stage].unsharded
            yield index, True, unsharded, pending, activations
        elif op is Op.RESHARD:
            unsharded -= price.memory[stage].unsharded
            yield index, False, unsharded, pending, activations
        elif op is Op.REDUCE_GRAD:
            # A reduction copies what it reduces; FSDP2 gives the copy back at the next one.
            pending -= price.memory[stage].unsharded_gradients * (stage in unreduced) + buffer
            buffer = price.memory[stage].unsharded_gradients
            pending += buffer
            unreduced.discard(stage)
            yield index, False, unsharded, pending, activations
        elif (op, stage) in moves:
            if op in MAKES_GRADIENTS and stage not in unreduced:
                unreduced.add(stage)
                pending += price.memory[stage].unsharded_gradients
                yield index, True, unsharded, pending, activations
            move = moves[op, stage]
            activations += move
            yield index, move > 0, unsharded, pending, activations


def _moves(plan: Plan, price: PlanPrice, rank: int) -> dict[tuple[Op, int], int]:
    """By how much a compute action changes the bytes of activations."""
    moves = {}
    for stage in plan.schedule.stages_of(rank):
        memory = price.memory[stage]
        moves[Op.FORWARD, stage] = memory.activations
        moves[Op.FULL_BACKWARD, stage] = -memory.activations
        moves[Op.BACKWARD_INPUT, stage] = memory.deferred - memory.activations
        moves[Op.BACKWARD_WEIGHT, stage] = -memory.deferred
    return moves
