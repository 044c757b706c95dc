"""Lowering for torch's own pipeline runtime over FSDP2, in the form that torch calls
``compute_comms`` (``pipelining/schedules.py``: ``_PipelineScheduleRuntime``).

That runtime differs from the engine in three ways. It asks for gathered parameters at
``BACKWARD_WEIGHT``, too, so a stage is released behind its weight gradients and not before them:
more parameters stay gathered. And its ``REDUCE_GRAD`` releases the stage by itself without noting
it. An input gradient that follows would then find parameters that are not in its graph, and leave
them without a gradient. So every reduction is followed by a release, which tells the runtime, and
by a new gather where the stage is not at its window's end. And NCCL runs messages between
two ranks on one stream, in the order of their start, or all messages of a rank, where
``init_process_group`` was given a device. Two ranks that both receive before they send would wait
for ever, so all ranks start their messages in one common order, that of torch's own lowering
(``_add_send_recv``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from zeropp.schedule.legality import ScheduleError
from zeropp.schedule.passes import add_gathers, add_reductions
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
        again: list[Action] = []  # with a release and a gather, where no release follows
        for action, following in zip(reduced, (*reduced[1:], None), strict=True):
            again.append(action)
            release = Action(action.stage, Op.RESHARD)
            if action.op is Op.REDUCE_GRAD and following != release:
                again += [release, Action(action.stage, Op.UNSHARD)]
        programs.append(tuple(again))
    return replace(
        schedule, programs=with_messages(programs, schedule.stage_rank), pair_streams=True
    )


_MESSAGES = {  # how far away the stage is that gets what is made, and the message's halves
    Op.FORWARD: (1, Op.SEND_F, Op.RECV_F),
    Op.BACKWARD_INPUT: (-1, Op.SEND_B, Op.RECV_B),
    Op.FULL_BACKWARD: (-1, Op.SEND_B, Op.RECV_B),
}


def with_messages(
    programs: Sequence[RankProgram], stage_rank: Sequence[int]
) -> tuple[RankProgram, ...]:
    """The programs with sends and receives, placed as torch places them (``_add_send_recv``): ranks
    take turns, an action each, and both halves of a message follow the action that makes it.
    Raises ScheduleError where every rank waits."""
    waiting = [deque(program) for program in programs]
    out: list[list[Action]] = [[] for _ in programs]
    stages = range(len(stage_rank))
    made: set[tuple[int, int, int | None]] = set()  # (stage, direction, microbatch)
    while left := sum(map(len, waiting)):
        for actions, own in zip(waiting, out, strict=True):
            if not actions:
                continue
            stage, op, microbatch = actions[0]
            away, send, receive = _MESSAGES.get(op, (0, op, op))
            if away and stage - away in stages and (stage - away, away, microbatch) not in made:
                continue
            own.append(actions.popleft())
            peer = stage + away
            if away:
                made.add((stage, away, microbatch))
            if away and peer in stages and stage_rank[peer] != stage_rank[stage]:
                own.append(Action(stage, send, microbatch))
                out[stage_rank[peer]].append(Action(peer, receive, microbatch))
        if left == sum(map(len, waiting)):
            raise ScheduleError("every rank waits for a message that none sends")
    return tuple(map(tuple, out))
