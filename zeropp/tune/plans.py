"""From a candidate to a Plan: first its sizes alone, to be priced; then with its programs."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from zeropp.cost import balanced_cuts
from zeropp.plan import Plan
from zeropp.schedule import build, lower
from zeropp.schedule.action import Action, Op
from zeropp.schedule.program import Schedule, loop_placement, v_placement
from zeropp.shape import ModelShape
from zeropp.tune.space import Candidate, Task


def sized_plan(task: Task, candidate: Candidate) -> Plan:
    """The plan without programs: all that the cost model reads."""
    layout = candidate.layout
    if candidate.schedule == "fsdp":
        placement = (0,) * task.shape.num_pieces
    elif candidate.schedule == "zbv":
        placement = v_placement(layout.pp)
    else:
        placement = loop_placement(layout.pp, layout.chunks)
    unit = 1 if candidate.schedule == "fsdp" else candidate.unit or candidate.num_microbatches
    return Plan(
        contender=candidate.contender,
        shape=task.shape,
        layout=layout,
        microbatch_size=candidate.microbatch_size,
        schedule=Schedule(candidate.schedule, candidate.num_microbatches, unit, placement, ()),
        cuts=_cuts(task.shape, len(placement)),
        precision=task.precision,
        recompute=candidate.recompute,
        reduce_every=candidate.reduce_every,
    )


def with_programs(plan: Plan, candidate: Candidate) -> Plan:
    """The whole plan, by the orders that the contenders' own planners choose."""
    sizes = plan.schedule
    if sizes.name == "fsdp":
        schedule = replace(sizes, programs=(_fsdp(sizes.num_stages, sizes.num_microbatches),))
    else:
        schedule = build(
            sizes.name,
            num_ranks=plan.layout.pp,
            chunks=plan.layout.chunks,
            num_microbatches=sizes.num_microbatches,
            unit=candidate.unit or None,
            activation_cap=candidate.cap or None,
        )
    gather = plan.layout.shard > 1
    return replace(plan, schedule=lower(schedule, gather=gather, reduce_every=plan.reduce_every))


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
