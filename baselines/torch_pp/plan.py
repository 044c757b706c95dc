"""The plan of torch.distributed.pipelining: torch's own schedules. Imports no torch.

Orders of compute, gathers, releases and reductions are those of torch's schedule classes, which a
test reads out and compares. Torch gathers by its own rule (``_add_unshard_reshard``): the next
``_ACTIVE_STAGES`` stages of a rank that have something to compute are kept gathered.
"""

from __future__ import annotations

from dataclasses import replace

from baselines.refusals import refuse_knobs
from baselines.tensor_parallel import check_tensor_parallel
from baselines.torch_pp.dualpipev import dualpipev
from zeropp.layout import InfeasibleError, Layout
from zeropp.plan import Plan, PlanRequest
from zeropp.planner.degrees import microbatches_per_step, resolve_layout
from zeropp.planner.zeropp_plan import assemble
from zeropp.schedule import build, lower, validate
from zeropp.schedule.action import Action, Op
from zeropp.schedule.program import Program, Schedule, v_placement

SCHEDULES = ("1f1b", "interleaved_1f1b", "looped_bfs", "interleaved_zb", "zbv", "dualpipev")
SPLIT_BACKWARD = ("interleaved_zb", "zbv", "dualpipev")
_ACTIVE_STAGES = 3


def plan(request: PlanRequest) -> Plan:
    """TP x PP x FSDP (x replicas); raises InfeasibleError in one line."""
    _refuse_what_torch_lacks(request)
    settings = request.settings
    layout = resolve_layout(request)
    check_tensor_parallel(request.shape, layout)
    microbatches = microbatches_per_step(request, layout)
    _check_microbatches(settings.schedule, layout.pp, microbatches)
    compute = _compute(settings.schedule, layout, microbatches)
    schedule = lower(compute, gather=False, reduce_every="step")
    validate(schedule)
    if layout.shard > 1:
        programs = (
            with_torch_gathers(program, order)
            for program, order in zip(schedule.programs, compute.programs, strict=True)
        )
        schedule = replace(schedule, programs=tuple(programs))
    return replace(assemble("torch_pp", request, layout, schedule), reduce_every="step")


def with_torch_gathers(program: Program, compute: Program) -> Program:
    """Add gathers and releases by torch's rule; ``compute`` are the program's compute actions.

    Before each compute action: release what is not among the next stages to compute, gather what
    is. Everything left is released at the end.
    """
    out: list[Action] = []
    active: list[int] = []
    index = 0
    for action in program:
        if action.op.is_compute:
            upcoming = _next_stages(compute[index:])
            index += 1
            out += [Action(stage, Op.RESHARD) for stage in active if stage not in upcoming]
            out += [Action(stage, Op.UNSHARD) for stage in upcoming if stage not in active]
            active = sorted(upcoming)
        out.append(action)
    return (*out, *(Action(stage, Op.RESHARD) for stage in active))


def _next_stages(actions: Program) -> list[int]:
    stages: list[int] = []
    for action in actions:
        if action.stage not in stages:
            stages.append(action.stage)
            if len(stages) == _ACTIVE_STAGES:
                break
    return stages


def _compute(name: str, layout: Layout, num_microbatches: int) -> Schedule:
    if name == "dualpipev":
        return Schedule(
            name=name,
            num_microbatches=num_microbatches,
            unit=num_microbatches,
            stage_rank=v_placement(layout.pp),
            programs=dualpipev(layout.pp, num_microbatches),
        )
    schedule = build(
        name, num_ranks=layout.pp, chunks=layout.chunks, num_microbatches=num_microbatches
    )
    if name == "looped_bfs":  # torch runs the backwards of a stage last in, first out
        programs = (_reverse_backwards(program) for program in schedule.programs)
        return replace(schedule, programs=tuple(programs))
    return schedule


def _reverse_backwards(program: Program) -> Program:
    forwards = [action for action in program if action.op is Op.FORWARD]
    backwards = [action for action in program if action.op is not Op.FORWARD]
    return (*forwards, *sorted(backwards, reverse=True))


def _refuse_what_torch_lacks(request: PlanRequest) -> None:
    settings = request.settings
    split = settings.schedule in SPLIT_BACKWARD
    chunks = _chunks_of(settings.schedule, settings.chunks)
    refusals = {
        "schedule": (settings.schedule not in SCHEDULES, f"use one of {', '.join(SCHEDULES)}"),
        "chunks": (
            settings.chunks != chunks,
            f"{settings.schedule} has another number (use {chunks})",
        ),
        "replicate_zero": (
            settings.replicate_zero != 0,
            "replicas hold whole optimizer states (use 0 and a larger contender.shard)",
        ),
        "prefetch": (settings.prefetch != 1, "torch gathers by a rule of its own (use 1)"),
        "compile": (
            settings.compile and split,
            "torch cannot split a compiled backward (use false)",
        ),
        "recompute": (
            settings.recompute != "none" and split,
            f"torch cannot split a recomputed backward (use none, or one of {SCHEDULES[:3]})",
        ),
    }
    refuse_knobs(settings, "torch_pp", refusals)


def _chunks_of(schedule: str, asked: int) -> int:
    if schedule == "1f1b":
        return 1
    return 2 if schedule in ("zbv", "dualpipev") else asked


def _check_microbatches(name: str, pp: int, num_microbatches: int) -> None:
    """Torch's own conditions on the number of microbatches."""
    least = {"1f1b": pp, "zbv": 2 * pp, "dualpipev": 2 * pp}.get(name, 1)
    multiple = pp if name in ("interleaved_1f1b", "interleaved_zb") else 1
    if num_microbatches < least or num_microbatches % multiple:
        wanted = f"a multiple of {multiple}" if multiple > 1 else f"at least {least}"
        raise InfeasibleError(
            f"contender.schedule={name}: torch wants {wanted} microbatches a step and pipeline, "
            f"not {num_microbatches} (change global_batch)"
        )
