"""ZeroPP's planner: from a task and knobs to the Plan that the engine runs. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from decimal import ROUND_CEILING, Context

from zeropp.contender.knobs import ZeroppKnobs
from zeropp.cost import PlanPrice, cut_by_cost
from zeropp.layout import InfeasibleError, Layout
from zeropp.literals import StageStyle, if_auto
from zeropp.plan import Plan, SizedPlan, Task
from zeropp.planner.degrees import (
    check_split_blocks,
    check_stages,
    default_chunks,
    microbatches_per_step,
    recomputed_blocks,
    resolve_degrees,
)
from zeropp.planner.orders import Draft, drafts
from zeropp.schedule.program import Schedule, place_stages, unordered
from zeropp.schedule.zeropp_order import cap_needs, default_cap, smallest_cap, unit_size


def size(task: Task, knobs: ZeroppKnobs, microbatch_size: int) -> SizedPlan:
    """A plan of PP x ZeRO-3 (x replicas), with all sizes but without an order of actions.

    Simple rules for what is ``auto``: one pipeline rank per node, two chunks per rank, units of as
    many microbatches as there are pipeline ranks (on CPUs all), a cap of a unit's activations.
    Raises InfeasibleError, whose message is one line.
    """
    _refuse(task, knobs)
    layout = _layout(task, knobs)
    microbatches = microbatches_per_step(task, layout, microbatch_size)
    style: StageStyle = "loop" if knobs.stage_style == "auto" else knobs.stage_style
    hides = task.cluster.device.hides_collectives
    unit = unit_size(knobs.unit, style, layout.pp, microbatches, hides_collectives=hides)
    cap = _cap(knobs, default_cap(style, layout.pp, layout.chunks, unit))
    placement = place_stages(style, layout.pp, layout.chunks)
    plan = SizedPlan(
        contender="zeropp",
        shape=task.shape,
        layout=layout,
        microbatch_size=microbatch_size,
        schedule=unordered("zeropp", placement, microbatches, unit),
        cuts=(),
        program="zeropp",
        precision=task.precision,
        recompute=if_auto(knobs.recompute, "none"),
        recomputed=recomputed_blocks(knobs.recompute_blocks, len(placement)),
        reduce_every=if_auto(knobs.reduce_every, "unit"),
        replicate_every=knobs.replicate_every,
        reduce_dtype=knobs.reduce_dtype,
        prefetch=knobs.prefetch,
        keep=if_auto(knobs.keep, 0),
        stage_style=style,
        split_backward=knobs.split_backward,
        activation_cap=cap,
        compile=knobs.compile,
    )
    _check_cap(plan)
    cuts = cut_by_cost(plan, task.cluster, split_blocks=_split_blocks(knobs))
    return replace(plan, cuts=cuts)


def order(plan: SizedPlan, knobs: ZeroppKnobs, price: PlanPrice) -> Iterator[Plan]:
    """The plan with each of its orders, completed: see ``order_drafts``."""
    return (draft.complete() for draft in order_drafts(plan, knobs, price))


def order_drafts(
    plan: SizedPlan,
    knobs: ZeroppKnobs,
    price: PlanPrice,
    too_large: Callable[[Schedule], bool] | None = None,
) -> Iterator[Draft]:
    """The plan in the order for equally long actions, then in those planned with the durations of
    its ``price``; ``too_large`` is as in ``zeropp.planner.orders.drafts``. A cap that is given in
    GiB becomes a number of chunk-activations here, because the price says how large one is. Raises
    InfeasibleError if that is too few."""
    if knobs.activation_cap_gib != "auto":
        plan = replace(plan, activation_cap=_cap_by_size(plan, price, knobs.activation_cap_gib))
    yield from drafts(plan, plan.activation_cap, price, too_large)


def _split_blocks(knobs: ZeroppKnobs) -> bool:
    return if_auto(knobs.split_blocks, False)


def _cap(knobs: ZeroppKnobs, default: int) -> int:
    """The activation cap in chunk-activations; 0 if it was given in GiB, because then it is not
    known before the price (``order_drafts`` sets it)."""
    return if_auto(knobs.activation_cap, default) if knobs.activation_cap_gib == "auto" else 0


def _layout(task: Task, knobs: ZeroppKnobs) -> Layout:
    layout = resolve_degrees(task, knobs)
    layout = replace(
        layout,
        chunks=if_auto(knobs.chunks, default_chunks(task, layout)),
        replicate_zero=if_auto(knobs.replicate_zero, 0),
        placement=if_auto(knobs.placement, "dp_inner"),
    )
    check_stages(task, layout, split_blocks=_split_blocks(knobs))
    return layout


def _check_cap(plan: SizedPlan) -> None:
    smallest, needs = _smallest_cap(plan)
    if 0 < plan.activation_cap < smallest:
        raise InfeasibleError(f"contender.activation_cap={plan.activation_cap}: {needs}")


def _smallest_cap(plan: SizedPlan) -> tuple[int, str]:
    """(the fewest chunk-activations with which a unit can run, a message that says so)."""
    unit, chunks, style = plan.schedule.unit, plan.layout.chunks, plan.stage_style
    smallest = smallest_cap(style, chunks, plan.num_microbatches, unit)
    return smallest, cap_needs(style, chunks, unit, smallest)


def _cap_by_size(plan: SizedPlan, price: PlanPrice, cap_gib: float) -> int:
    """The cap as a number of chunk-activations: how many of the largest chunk's fit ``cap_gib``."""
    gib = max(max(m.activations, m.deferred) for m in price.memory) / 2**30
    cap = min(int(cap_gib // gib), plan.num_microbatches * plan.layout.chunks)
    smallest, needs = _smallest_cap(plan)
    if cap < smallest:
        enough = Context(prec=2, rounding=ROUND_CEILING).create_decimal(smallest * gib)
        raise InfeasibleError(
            f"contender.activation_cap_gib={cap_gib}: {cap} chunk-activations fit, but {needs} "
            f"(use {enough:f} or more)"
        )
    return cap


def _refuse(task: Task, knobs: ZeroppKnobs) -> None:
    if knobs.activation_cap_gib != "auto" and knobs.activation_cap != "auto":
        raise InfeasibleError(
            f"contender.activation_cap_gib={knobs.activation_cap_gib}: "
            f"contender.activation_cap={knobs.activation_cap} sets it too (set one to auto)"
        )
    check_split_blocks(task, knobs.split_blocks)
    if knobs.compile and task.shape.dropout > 0:
        raise InfeasibleError(
            f"contender.compile={knobs.compile}: compiled blocks draw dropout masks from a random "
            "generator of their own, which would make runs differ (use false, or model.dropout=0)"
        )
