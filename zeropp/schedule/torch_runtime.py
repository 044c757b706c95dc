"""Lowering for torch's own pipeline runtime over FSDP2, in the form that torch calls
``compute_comms`` (``pipelining/schedules.py``: ``_PipelineScheduleRuntime``).

That runtime differs from the engine in two ways. It asks for gathered parameters at
``BACKWARD_WEIGHT``, too, so a stage is released behind its weight gradients and not before them:
more parameters stay gathered. And its ``REDUCE_GRAD`` releases the stage by itself without noting
it. An input gradient that follows would then find parameters that are not in its graph, and leave
them without a gradient. So every reduction is followed by a release, which tells the runtime, and
by a new gather where the stage is not at its window's end.
"""

from __future__ import annotations

from dataclasses import replace

from zeropp.schedule.passes import add_gathers, add_reductions, add_transfers
from zeropp.schedule.program import (
    MAKES_GRADIENTS,
    NEEDS_PARAMETERS,
    Action,
    Op,
    RankProgram,
    Schedule,
    collector_paused,
)


@collector_paused()
def lower_for_torch(schedule: Schedule, *, prefetch: int = 1) -> Schedule:
    """The programs of a schedule of compute actions alone, as torch's runtime can run them on
    stages that FSDP2 shards: each stage is gathered ``prefetch`` windows ahead of its use, and its
    gradients are reduced once per unit."""
    needs = NEEDS_PARAMETERS | MAKES_GRADIENTS
    programs = []
    for compute in schedule.programs:
        gathered = add_gathers(compute, schedule.unit, prefetch, needs)
        reduced = add_reductions(gathered, schedule.unit, schedule.num_microbatches)
        programs.append(_gathered_again(reduced))
    return replace(schedule, programs=add_transfers(programs, schedule))


def _gathered_again(program: RankProgram) -> RankProgram:
    """The program with a release and a gather behind every reduction that no release follows."""
    out: list[Action] = []
    for action, following in zip(program, (*program[1:], None), strict=True):
        out.append(action)
        release = Action(action.stage, Op.RESHARD)
        if action.op is Op.REDUCE_GRAD and following != release:
            out += [release, Action(action.stage, Op.UNSHARD)]
    return tuple(out)
