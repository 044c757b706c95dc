"""The plan of a public 3D program: TP x PP x DP with one of its schedules. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from baselines.public_3d.knobs import Public3DKnobs, Public3DSchedule
from baselines.public_3d.offers import OFFERS
from baselines.tensor_parallel import check_tensor_parallel
from zeropp.cost import PlanPrice, cut_by_cost
from zeropp.layout import InfeasibleError, Layout
from zeropp.literals import if_auto
from zeropp.plan import Plan, SizedPlan, Task
from zeropp.planner.degrees import (
    check_split_blocks,
    check_stages,
    microbatches_per_step,
    recomputed_blocks,
    resolve_degrees,
)
from zeropp.schedule import build, lower
from zeropp.schedule.program import Schedule, loop_placement, unordered, v_placement

_FIXED_CHUNKS = {"1f1b": 1, "zb_h1": 1, "zbv": 2}


def size(task: Task, knobs: Public3DKnobs, microbatch_size: int) -> SizedPlan:
    """A plan of TP x PP x DP with ZeRO 0 or 1, with all sizes but without an order of actions.
    Raises InfeasibleError, whose message is one line."""
    schedule: Public3DSchedule = if_auto(knobs.schedule, "1f1b")
    layout = replace(
        resolve_degrees(task, replace(knobs, tp=if_auto(knobs.tp, 1))),
        chunks=if_auto(knobs.chunks, _FIXED_CHUNKS.get(schedule, 2)),
        replicate_zero=if_auto(knobs.replicate_zero, 0),
        sequence_parallel=if_auto(knobs.sequence_parallel, False),
        placement=if_auto(knobs.placement, "dp_inner"),
    )
    _check_offer(knobs, schedule)
    split_blocks = if_auto(knobs.split_blocks, False)
    check_split_blocks(task, knobs.split_blocks)
    check_stages(task, layout, split_blocks=split_blocks)
    check_tensor_parallel(task.shape, layout)
    microbatches = microbatches_per_step(task, layout, microbatch_size)
    _check_schedule(knobs, schedule, layout, microbatches)
    pp, chunks = layout.pp, layout.chunks
    placement = v_placement(pp) if schedule == "zbv" else loop_placement(pp, chunks)
    plan = SizedPlan(
        contender=knobs.name,
        shape=task.shape,
        layout=layout,
        microbatch_size=microbatch_size,
        schedule=unordered(schedule, placement, microbatches),
        cuts=(),
        program=OFFERS[knobs.name].program,
        precision=task.precision,
        recompute=if_auto(knobs.recompute, "none"),
        recomputed=recomputed_blocks(knobs.recompute_blocks, len(placement)),
        reduce_every="step",
    )
    return replace(plan, cuts=cut_by_cost(plan, task.cluster, split_blocks=split_blocks))


def order(plan: SizedPlan, knobs: Public3DKnobs, price: PlanPrice) -> Iterator[Plan]:
    """The plan with the programs of its schedule: one order, so this yields one plan."""
    layout, m = plan.layout, plan.num_microbatches
    group = _group(layout.pp, m)
    schedule = _schedule(
        plan.schedule.name,
        num_ranks=layout.pp,
        chunks=layout.chunks,
        num_microbatches=m,
        group=group,
    )
    yield plan.ordered(schedule)


@lru_cache(maxsize=128)
def _schedule(
    name: str, *, num_ranks: int, chunks: int, num_microbatches: int, group: int
) -> Schedule:
    """A lowered schedule, cached, because many plans that differ in other degrees share it."""
    order = build(
        name, num_ranks=num_ranks, chunks=chunks, num_microbatches=num_microbatches, group=group
    )
    return lower(order, gather=False, reduce_every="step")


def _check_offer(knobs: Public3DKnobs, schedule: Public3DSchedule) -> None:
    offer = OFFERS[knobs.name]
    if schedule not in offer.schedules:
        known = ", ".join(offer.schedules)
        raise InfeasibleError(
            f"contender.schedule={schedule}: {knobs.name} does not have it (use one of {known})"
        )
    if knobs.recompute not in ("auto", *offer.recomputes):
        known = ", ".join(offer.recomputes)
        raise InfeasibleError(
            f"contender.recompute={knobs.recompute}: {knobs.name} does not have it (use one of "
            f"{known})"
        )
    if knobs.split_blocks is True and not offer.split_blocks:
        raise InfeasibleError(
            f"contender.split_blocks=true: {knobs.name} cuts between blocks (use false)"
        )
    if knobs.sequence_parallel is True and not offer.sequence_parallel:
        raise InfeasibleError(
            f"contender.sequence_parallel=true: {knobs.name} does not have it (use false)"
        )


def _check_schedule(
    knobs: Public3DKnobs, name: Public3DSchedule, layout: Layout, num_microbatches: int
) -> None:
    pp, chunks = layout.pp, layout.chunks
    fixed = _FIXED_CHUNKS.get(name, chunks)
    if chunks != fixed:
        raise InfeasibleError(
            f"contender.chunks={chunks}: {name} has {fixed} per rank (use {fixed})"
        )
    if pp == 1 and name != "1f1b":
        raise InfeasibleError(
            f"contender.schedule={name}: one pipeline rank leaves nothing to schedule (use 1f1b)",
            "no pipeline to schedule",
        )
    few = num_microbatches < pp and not OFFERS[knobs.name].interleaves_few
    if name.startswith("interleaved") and few:
        raise InfeasibleError(
            f"contender.schedule={name}: {num_microbatches} microbatches per step and pipeline "
            f"must be at least contender.pp={pp} (change global_batch)",
            "fewer microbatches than pipeline ranks",
        )


def _group(pp: int, num_microbatches: int) -> int:
    """The microbatches that interleaving sends through a chunk before the next chunk.

    It is the smallest number that Megatron-Core allows (``microbatch_group_size_per_vp_stage``): at
    least P, and the last group has none or at least P. Programs that interleave fewer than P
    microbatches send all of them.
    """
    groups = range(min(pp, num_microbatches), num_microbatches + 1)
    return next(size for size in groups if (left := num_microbatches % size) == 0 or left >= pp)
