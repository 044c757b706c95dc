"""From a candidate to a Plan: first its sizes alone, to be priced; then with its programs."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from zeropp.cost import PlanPrice, balanced_cuts
from zeropp.literals import ReduceEvery
from zeropp.plan import Plan
from zeropp.planner.zeropp_plan import orders
from zeropp.schedule import build, lower
from zeropp.schedule.action import Action, Op
from zeropp.schedule.program import Schedule, place_stages, v_placement
from zeropp.shape import ModelShape
from zeropp.tune.space import SPACES, Candidate, Task


def sized_plan(task: Task, candidate: Candidate) -> Plan:
    """The plan without programs: all that the cost model reads."""
    layout = candidate.layout
    if candidate.schedule == "fsdp":
        placement = (0,) * task.shape.num_pieces
    elif candidate.schedule == "zbv":
        placement = v_placement(layout.pp)
    else:
        placement = place_stages(candidate.stage_style, layout.pp, layout.chunks)
    unit = 1 if candidate.schedule == "fsdp" else candidate.unit or candidate.num_microbatches
    return Plan(
        contender=candidate.contender,
        shape=task.shape,
        layout=layout,
        microbatch_size=candidate.microbatch_size,
        schedule=Schedule(candidate.schedule, candidate.num_microbatches, unit, placement, ()),
        cuts=_cuts(task.shape, len(placement)),
        program=SPACES[candidate.contender].program,
        precision=task.precision,
        recompute=candidate.recompute,
        reduce_every=candidate.reduce_every,
        stage_style=candidate.stage_style,
    )


def with_programs(
    plan: Plan, candidate: Candidate, price: PlanPrice | None = None
) -> tuple[Plan, ...]:
    """The whole plan, with each of the orders among which the contender's own planner chooses;
    without a price, with the one that needs none."""
    sizes = plan.schedule
    if sizes.name == "zeropp":
        return orders(plan, candidate.cap, price)
    schedule = _schedule(
        sizes.name,
        plan.layout.pp,
        sizes.num_stages // plan.layout.pp,
        sizes.num_microbatches,
        plan.gathers,
        plan.reduce_every,
    )
    return (replace(plan, schedule=schedule),)


@lru_cache(maxsize=128)
def _schedule(
    name: str,
    num_ranks: int,
    chunks: int,
    num_microbatches: int,
    gather: bool,
    reduce_every: ReduceEvery,
) -> Schedule:
    """A lowered schedule; many configurations that differ in other degrees share it."""
    if name == "fsdp":
        placement = (0,) * chunks
        program = _fsdp(chunks, num_microbatches)
        schedule = Schedule(name, num_microbatches, 1, placement, (program,))
    else:
        schedule = build(
            name, num_ranks=num_ranks, chunks=chunks, num_microbatches=num_microbatches
        )
    return lower(schedule, gather=gather, reduce_every=reduce_every)


def _fsdp(stages: int, microbatches: int) -> tuple[Action, ...]:
    """Layer by layer there and back, a microbatch after the other; a stage is one piece."""
    return tuple(
        action
        for j in range(microbatches)
        for action in (
            *(Action(s, Op.FORWARD, j) for s in range(stages)),
            *(Action(s, Op.FULL_BACKWARD, j) for s in reversed(range(stages))),
        )
    )


@lru_cache(maxsize=4096)
def _cuts(shape: ModelShape, num_stages: int) -> tuple[int, ...]:
    return balanced_cuts(shape, num_stages)
