"""Lowering: add transfers, parameter gathers and releases, and gradient reductions.

Input is a compute-only schedule. Reductions and gathers look at one rank's program at a time; the
transfers' pass looks at all, because receives must be posted in the order of the sends.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from zeropp.schedule.action import MAKES_GRADIENTS, NEEDS_PARAMETERS, Action, Op
from zeropp.schedule.program import Program, Schedule

ReduceEvery = Literal["unit", "step"]


def lower(
    schedule: Schedule, *, gather: bool, prefetch: int = 1, reduce_every: ReduceEvery = "unit"
) -> Schedule:
    """The whole program of a schedule, ready to be run.

    ``gather``: parameters are sharded, so gathers and releases are added, each gather
    ``prefetch`` windows ahead of its use. Gradients are reduced after the last weight gradient of
    a stage's unit, or of its step. Raises ValueError on a schedule that is lowered already.
    """
    if any(not a.op.is_compute for program in schedule.programs for a in program):
        raise ValueError(f"schedule {schedule.name} is lowered already")
    span = schedule.unit if reduce_every == "unit" else schedule.num_microbatches
    programs = [_add_reductions(program, span) for program in schedule.programs]
    if gather:
        programs = [_add_gathers(p, schedule.unit, prefetch) for p in programs]
    return replace(schedule, programs=_add_transfers(programs, schedule.stage_rank))


@dataclass
class Window:
    """A stretch of a program, from index ``first`` to ``last``, that needs a stage's parameters."""

    stage: int
    first: int
    last: int


def parameter_windows(program: Program, unit: int) -> list[Window]:
    """Where a rank needs which parameters, in the order in which the needs begin.

    A phase is the forwards, or the input gradients, of one stage and unit; weight gradients need
    no parameters. Two phases of a stage that overlap, or between which no other phase begins, are
    one window: the parameters stay, which saves a gather (the last chunk turns round from forward
    to backward; chunk 0 does from one unit to the next).
    """
    phases: dict[tuple[int, int, bool], Window] = {}
    for index, action in enumerate(program):
        if action.op in NEEDS_PARAMETERS:
            key = (action.stage, _microbatch(action) // unit, action.op is Op.FORWARD)
            phases.setdefault(key, Window(action.stage, index, index)).last = index
    windows: list[Window] = []
    open_window: dict[int, Window] = {}
    began = -1
    for phase in sorted(phases.values(), key=lambda w: w.first):
        window = open_window.get(phase.stage)
        if window is not None and (began <= window.last or phase.first <= window.last):
            window.last = max(window.last, phase.last)
        else:
            open_window[phase.stage] = phase
            windows.append(phase)
        began = phase.first
    return windows


def _add_gathers(program: Program, unit: int, prefetch: int) -> Program:
    windows = parameter_windows(program, unit)
    before: dict[int, list[Action]] = defaultdict(list)
    after: dict[int, list[Action]] = defaultdict(list)
    released: dict[int, int] = {}  # stage -> index after which it is free to be gathered again
    for number, window in enumerate(windows):
        place = windows[max(0, number - prefetch)].first
        place = max(place, released.get(window.stage, 0))
        before[place].append(Action(window.stage, Op.UNSHARD))
        after[window.last].append(Action(window.stage, Op.RESHARD))
        released[window.stage] = window.last + 1
    return _insert(program, before, after)


def _add_reductions(program: Program, span: int) -> Program:
    last: dict[tuple[int, int], int] = {}
    for index, action in enumerate(program):
        if action.op in MAKES_GRADIENTS:
            last[action.stage, _microbatch(action) // span] = index
    after: dict[int, list[Action]] = defaultdict(list)
    for (stage, _), index in last.items():
        after[index].append(Action(stage, Op.REDUCE_GRAD))
    return _insert(program, {}, after)


Message = tuple[Op, int, int]  # the receiver's RECV_F or RECV_B, its stage, microbatch


def _add_transfers(programs: Iterable[Program], stage_rank: Sequence[int]) -> tuple[Program, ...]:
    """Sends right after their producer; receives one compute action ahead of their consumer, and
    on each channel (ordered pair of ranks) in the order of the sends. A receive is only posted,
    nobody waits for a send: so no order of arrival can make two ranks wait for each other."""
    programs = list(programs)
    channels: dict[tuple[int, int], list[Message]] = defaultdict(list)
    sends: list[dict[int, list[Action]]] = []
    for rank, program in enumerate(programs):
        after: dict[int, list[Action]] = defaultdict(list)
        for index, action in enumerate(program):
            send = _send_of(action, stage_rank)
            if send is not None:
                after[index].append(send)
                message = _message_of(send)
                channels[rank, stage_rank[message[1]]].append(message)
        sends.append(after)
    position = {
        (source, target, message): index
        for (source, target), messages in channels.items()
        for index, message in enumerate(messages)
    }
    lowered = []
    for rank, program in enumerate(programs):
        before = _receives(program, rank, stage_rank, channels, position)
        lowered.append(_insert(program, before, sends[rank]))
    return tuple(lowered)


def _receives(
    program: Program,
    rank: int,
    stage_rank: Sequence[int],
    channels: dict[tuple[int, int], list[Message]],
    position: dict[tuple[int, int, Message], int],
) -> dict[int, list[Action]]:
    before: dict[int, list[Action]] = defaultdict(list)
    posted: dict[int, int] = defaultdict(int)  # source rank -> messages posted so far
    ahead = 0  # index of the compute action before the current one
    for index, action in enumerate(program):
        need = _need_of(action, stage_rank)
        if need is not None:
            source, message = need
            upto = position[source, rank, message] + 1
            for op, stage, microbatch in channels[source, rank][posted[source] : upto]:
                before[ahead].append(Action(stage, op, microbatch))
            posted[source] = max(posted[source], upto)
        if action.op.is_compute:
            ahead = index
    return before


def _send_of(action: Action, stage_rank: Sequence[int]) -> Action | None:
    """The send that follows a compute action, if its output leaves the rank."""
    stage = action.stage
    if action.op is Op.FORWARD and stage + 1 < len(stage_rank):
        op, target = Op.SEND_F, stage + 1
    elif action.op in (Op.BACKWARD_INPUT, Op.FULL_BACKWARD) and stage > 0:
        op, target = Op.SEND_B, stage - 1
    else:
        return None
    if stage_rank[target] == stage_rank[stage]:
        return None
    return Action(stage, op, action.microbatch)


def _message_of(send: Action) -> Message:
    if send.op is Op.SEND_F:
        return Op.RECV_F, send.stage + 1, _microbatch(send)
    return Op.RECV_B, send.stage - 1, _microbatch(send)


def _need_of(action: Action, stage_rank: Sequence[int]) -> tuple[int, Message] | None:
    """Source rank and message that a compute action needs from another rank."""
    stage = action.stage
    if action.op is Op.FORWARD and stage > 0:
        op, source = Op.RECV_F, stage_rank[stage - 1]
    elif action.op in (Op.BACKWARD_INPUT, Op.FULL_BACKWARD) and stage + 1 < len(stage_rank):
        op, source = Op.RECV_B, stage_rank[stage + 1]
    else:
        return None
    if source == stage_rank[stage]:
        return None
    return source, (op, stage, _microbatch(action))


def _insert(
    program: Program, before: dict[int, list[Action]], after: dict[int, list[Action]]
) -> Program:
    out: list[Action] = []
    for index, action in enumerate(program):
        out += before.get(index, ())
        out.append(action)
        out += after.get(index, ())
    return tuple(out)


def _microbatch(action: Action) -> int:
    assert action.microbatch is not None
    return action.microbatch
