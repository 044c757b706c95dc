"""From the knobs of a ZeroPP step to its plan.

``parallelize`` and the suite's contender both size their plans here, so that the same knobs give
the same plan. Without prices a plan has one order; with them there are others to choose from.
Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from zeropp.schedule.plan import Draft, Plan, SizedPlan, TooLarge
from zeropp.schedule.program import Schedule, StageCost, loop_placement, unordered
from zeropp.schedule.zeropp_order import StepSizes, cap_needs, smallest_cap, step_drafts, unit_size
from zeropp.types.knobs import StepKnobs
from zeropp.types.layout import InfeasibleError, Layout, microbatches_per_step
from zeropp.types.literals import Precision, if_auto
from zeropp.types.shape import ModelShape


def size_step(
    knobs: StepKnobs,
    layout: Layout,
    shape: ModelShape,
    *,
    global_batch: int,
    microbatch_size: int,
    precision: Precision,
    hides_collectives: bool,
    tied_pieces: tuple[int, ...] = (),
    whole_groups: tuple[str, ...] = (),
) -> SizedPlan:
    """The plan of a step of PP x ZeRO-3 (x replicas) without cuts and without an order of actions;
    ``tied_pieces`` and ``whole_groups`` as in ``SizedPlan``.

    Simple rules for what is ``auto``: units of as many microbatches as there are pipeline ranks,
    or of all where compute hides no collectives (on CPUs); a cap of a unit's activations; no
    recomputation; a reduction per unit. Raises InfeasibleError, in one line, where the batch or the
    unit does not divide, or the cap is too small.
    """
    microbatches = microbatches_per_step(global_batch, layout, microbatch_size)
    unit = unit_size(knobs.unit, layout.pp, microbatches, hides_collectives=hides_collectives)
    cap = if_auto(knobs.activation_cap, unit * layout.chunks)
    merged = knobs.merged_microbatches
    if unit % merged:
        raise InfeasibleError(
            f"{knobs.prefix}merged_microbatches={merged}: must divide the {unit} microbatches of a "
            "unit"
        )
    if cap < (least := smallest_cap(layout.chunks, microbatches, unit, merged)):
        raise InfeasibleError(
            f"{knobs.prefix}activation_cap={cap}: {cap_needs(layout.chunks, unit, least)} "
            "(or a smaller unit)"
        )
    split = knobs.split_backward and layout.pp > 1  # else there is no bubble to fill
    # Whether the engine adds weight gradients.
    added_by_engine = split or knobs.gradient_parts > 1 or merged > 1
    eight_bits = "zeropp_fp8_delayed" if added_by_engine else "zeropp_fp8"
    return SizedPlan(
        contender="zeropp",
        shape=shape,
        layout=layout,
        microbatch_size=microbatch_size,
        schedule=unordered("zeropp", loop_placement(layout.pp, layout.chunks), microbatches, unit),
        cuts=(),
        program=eight_bits if precision == "fp8" else "zeropp",
        precision=precision,
        recompute=if_auto(knobs.recompute, "none"),
        reduce_every=if_auto(knobs.reduce_every, "unit"),
        reduce_dtype=knobs.reduce_dtype,
        gradient_parts=knobs.gradient_parts,
        prefetch=knobs.prefetch,
        split_backward=split,
        merged_microbatches=merged,
        logits_slices=knobs.logits_slices,
        activation_cap=cap,
        compile=knobs.compile,
        tied_pieces=tied_pieces,
        whole_groups=whole_groups,
    )


def drafts(
    plan: SizedPlan,
    costs: Sequence[StageCost] | None = None,
    too_large: TooLarge | None = None,
) -> Iterator[Draft]:
    """The orders of a ZeroPP plan to choose from, made one by one: that for equal durations and, if
    ``costs`` are given, those planned with these durations of its stages. ``too_large`` says
    whether compute actions, of a whole order or of its beginning, need more memory than there is;
    such orders need not be planned to the end."""
    sizes = StepSizes(
        num_ranks=plan.layout.pp,
        chunks=plan.layout.chunks,
        num_microbatches=plan.num_microbatches,
        unit=plan.schedule.unit,
        activation_cap=plan.activation_cap,
        split_backward=plan.split_backward,
        merged=plan.merged_microbatches,
        # The engine computes on gathered shards, or on bf16 copies of fp32 masters.
        gather=plan.layout.shards > 1 or plan.precision != "fp32",
        prefetch=plan.prefetch,
        reduce_every=plan.reduce_every,
        offloaded=plan.offloaded_stages,
    )
    # Orders depend on no other durations, and without these more plans share cached orders.
    of_passes = tuple(
        StageCost(
            forward=cost.forward,
            backward_input=cost.backward_input,
            backward_weight=cost.backward_weight,
            transfer=cost.transfer,
        )
        for cost in costs or ()
    )
    for compute, complete in step_drafts(sizes, of_passes, too_large):
        yield Draft(partial(_completed, plan, complete), compute)


def _completed(plan: SizedPlan, complete: Callable[[], Schedule]) -> Plan:
    return plan.ordered(complete())
