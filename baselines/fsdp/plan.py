"""The plan of FSDP2 alone: gradient accumulation over microbatches. Imports no torch.

Every piece of the model (embedding, block, head) is a stage of its own on the only pipeline rank,
because FSDP2 gathers piece by piece, for the forward and again for the backward of every
microbatch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from baselines.fsdp.knobs import FSDPKnobs
from zeropp.cost import PlanPrice
from zeropp.literals import Auto, ReduceEvery, if_auto
from zeropp.plan import Plan, SizedPlan, Task
from zeropp.planner.degrees import microbatches_per_step, resolve_degrees
from zeropp.schedule import lower
from zeropp.schedule.action import Action, Op
from zeropp.schedule.program import Schedule, unordered


def size(task: Task, knobs: FSDPKnobs, microbatch_size: int) -> SizedPlan:
    """A plan of ZeRO-3 over ``shard`` ranks, ``replicate`` times, with all sizes but without an
    order of actions. By a simple rule ``shard: auto`` is the GPUs of a node. Raises
    InfeasibleError."""
    pieces = task.shape.num_pieces
    layout = replace(resolve_degrees(task, knobs), chunks=pieces)
    microbatches = microbatches_per_step(task, layout, microbatch_size)
    return SizedPlan(
        contender="fsdp",
        shape=task.shape,
        layout=layout,
        microbatch_size=microbatch_size,
        schedule=unordered("accumulation", (0,) * pieces, microbatches, 1),
        cuts=tuple(range(pieces + 1)),
        program="fsdp",
        precision=task.precision,
        recompute=if_auto(knobs.recompute, "none"),
        recomputed=_recomputed(knobs.recompute_blocks, pieces),
        reduce_every=if_auto(knobs.reduce_every, "unit"),
        compile=knobs.compile,
    )


def _recomputed(asked: int | Auto, pieces: int) -> tuple[int, ...]:
    """Recomputed blocks of every stage: 1 for the first ``asked`` blocks, else 0 (each stage is one
    piece, and the first piece is the embedding). ``auto`` gives (), which means all blocks."""
    return () if asked == "auto" else tuple(int(0 < i <= asked) for i in range(pieces))


def order(plan: SizedPlan, knobs: FSDPKnobs, price: PlanPrice) -> Iterator[Plan]:
    """The plan with its program: there is one order only, so this yields one plan."""
    stages, microbatches = plan.schedule.num_stages, plan.num_microbatches
    schedule = _schedule(stages, microbatches, plan.gathers, plan.reduce_every)
    yield plan.ordered(schedule)


@lru_cache(maxsize=128)
def _schedule(
    num_stages: int, num_microbatches: int, gathers: bool, reduce_every: ReduceEvery
) -> Schedule:
    order = accumulation(num_stages, num_microbatches)
    return lower(order, gather=gathers, reduce_every=reduce_every)


def accumulation(num_stages: int, num_microbatches: int) -> Schedule:
    """The schedule of gradient accumulation on one rank: microbatch by microbatch, a forward
    through all stages and then a backward. It has compute actions only."""
    program: list[Action] = []
    for microbatch in range(num_microbatches):
        program += [Action(stage, Op.FORWARD, microbatch) for stage in range(num_stages)]
        program += [
            Action(stage, Op.FULL_BACKWARD, microbatch) for stage in reversed(range(num_stages))
        ]
    return Schedule(
        name="accumulation",
        num_microbatches=num_microbatches,
        unit=1,
        stage_rank=(0,) * num_stages,
        programs=(tuple(program),),
    )
