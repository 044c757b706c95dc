"""The plan of FSDP2 alone: microbatch after microbatch, layer after layer. Imports no torch.

Every piece of the model is a stage of its own on the only pipeline rank: FSDP2 gathers piece by
piece, for the forward and again for the backward of every microbatch.
"""

from __future__ import annotations

from dataclasses import replace

from baselines.refusals import refuse_knobs
from zeropp.plan import Plan, PlanRequest, Settings
from zeropp.planner.degrees import microbatches_per_step, resolve_layout
from zeropp.planner.zeropp_plan import assemble
from zeropp.schedule import lower, validate
from zeropp.schedule.action import Action, Op
from zeropp.schedule.program import Schedule


def plan(request: PlanRequest) -> Plan:
    """ZeRO-3 over ``shard``, copies over ``replicate``; raises InfeasibleError in one line."""
    settings = request.settings
    _refuse_what_fsdp_lacks(settings)
    layout = resolve_layout(replace(request, settings=replace(settings, pp=1)))
    layout = replace(layout, chunks=request.shape.num_pieces)
    schedule = lower(
        accumulation(layout.chunks, microbatches_per_step(request, layout)),
        gather=layout.shard > 1,
        reduce_every=settings.reduce_every,
    )
    validate(schedule)
    cuts = tuple(range(schedule.num_stages + 1))
    return assemble("fsdp", request, layout, schedule, cuts)


def accumulation(num_stages: int, num_microbatches: int) -> Schedule:
    """Gradient accumulation on one rank: each microbatch through all stages and back."""
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


def _refuse_what_fsdp_lacks(settings: Settings) -> None:
    refusals = {
        "pp": (settings.pp not in (1, "auto"), "it has no pipeline (use 1)"),
        "tp": (settings.tp != 1, "it has no tensor parallelism (use 1, or torch_pp)"),
        "chunks": (settings.chunks != 1, "it has no pipeline (use 1)"),
        "replicate_zero": (
            settings.replicate_zero != 0,
            "replicas hold whole optimizer states (use 0 and a larger contender.shard)",
        ),
        "schedule": (settings.schedule != "auto", "it has no pipeline (use auto)"),
        "sequence_parallel": (settings.sequence_parallel, "it has no tensor parallelism"),
        "prefetch": (settings.prefetch != 1, "FSDP2 gathers one layer ahead by itself (use 1)"),
    }
    refuse_knobs(settings, "fsdp", refusals)
