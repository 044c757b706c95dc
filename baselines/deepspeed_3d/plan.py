"""The plan of DeepSpeed 3D: plain 1F1B over stages balanced by cost. Imports no torch.

Its programs are those of DeepSpeed's own ``TrainSchedule``; a test compares them.
"""

from __future__ import annotations

from dataclasses import replace

from baselines.refusals import refuse_knobs
from baselines.tensor_parallel import check_tensor_parallel
from zeropp.plan import Plan, PlanRequest
from zeropp.planner.degrees import microbatches_per_step, resolve_layout
from zeropp.planner.zeropp_plan import assemble
from zeropp.schedule import build, validate
from zeropp.schedule.action import Action, Op
from zeropp.schedule.program import Program, Schedule


def plan(request: PlanRequest) -> Plan:
    """TP x PP x DP (ZeRO-0 or 1); raises InfeasibleError in one line."""
    _refuse_what_deepspeed_lacks(request)
    layout = resolve_layout(request)
    check_tensor_parallel(request.shape, layout)
    schedule = build(
        "1f1b",
        num_ranks=layout.pp,
        chunks=1,
        num_microbatches=microbatches_per_step(request, layout),
    )
    schedule = with_deepspeed_exchanges(schedule)
    validate(schedule)
    return replace(assemble("deepspeed_3d", request, layout, schedule), reduce_every="step")


def with_deepspeed_exchanges(schedule: Schedule) -> Schedule:
    """Add transfers and the final reduction to a compute-only 1F1B in DeepSpeed's own order.

    DeepSpeed counts in time slots. It sends what a pass made in the slot after it, and where that
    slot holds a backward pass it receives for it first (``TrainSchedule.steps``).
    """
    last = schedule.num_stages - 1
    programs = (_exchanges(program, last) for program in schedule.programs)
    return replace(schedule, programs=tuple(programs))


def _exchanges(program: Program, last: int) -> Program:
    out: list[Action] = []
    unsent: list[Action] = []
    slot = -1
    for action in program:
        previous, slot = slot, _slot(action, last)
        received, sent = _transfers(action, last)
        receive_first = action.op is Op.FULL_BACKWARD and slot == previous + 1
        out += (*received, *unsent) if receive_first else (*unsent, *received)
        out.append(action)
        unsent = sent
    return (*out, *unsent, Action(program[0].stage, Op.REDUCE_GRAD))


def _slot(action: Action, last: int) -> int:
    """Time slot of a pass, where forward and backward passes take one each."""
    assert action.microbatch is not None
    first = action.stage if action.op is Op.FORWARD else 2 * last + 1 - action.stage
    return first + 2 * action.microbatch


def _transfers(action: Action, last: int) -> tuple[list[Action], list[Action]]:
    """What a pass receives and what it sends: one transfer each, or none at the pipeline's ends."""
    stage, microbatch = action.stage, action.microbatch
    up = [] if stage == 0 else [Op.RECV_F, Op.SEND_B]
    down = [] if stage == last else [Op.SEND_F, Op.RECV_B]
    before = Op.RECV_F if action.op is Op.FORWARD else Op.RECV_B
    after = Op.SEND_F if action.op is Op.FORWARD else Op.SEND_B
    ops = up + down
    return (
        [Action(stage, before, microbatch)] if before in ops else [],
        [Action(stage, after, microbatch)] if after in ops else [],
    )


def _refuse_what_deepspeed_lacks(request: PlanRequest) -> None:
    settings = request.settings
    bf16 = request.precision == "bf16"
    refusals = {
        "chunks": (settings.chunks != 1, "its pipeline engine has no interleaving (use 1)"),
        "shard": (
            settings.shard not in (1, "auto"),
            "its pipeline engine refuses ZeRO-2 and ZeRO-3 (use 1; contender.replicate is its DP)",
        ),
        "schedule": (
            settings.schedule not in ("auto", "1f1b"),
            "it has 1F1B only (use 1f1b)",
        ),
        "replicate_zero": (
            bf16 and settings.replicate_zero == 0,
            "it accumulates gradients of bf16 parameters in fp32 with ZeRO-1 only (use 1)",
        ),
        "sequence_parallel": (settings.sequence_parallel, "not in this baseline (use false)"),
        "recompute": (settings.recompute == "selective", "use none or full"),
        "placement": (settings.placement != "dp_inner", "DeepSpeed's order is dp_inner"),
        "compile": (settings.compile, "not supported by its pipeline engine (use false)"),
    }
    refuse_knobs(settings, "deepspeed_3d", refusals)
