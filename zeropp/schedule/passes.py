"""Lowering: add transfers, parameter gathers and releases, and gradient reductions.

Input is a compute-only schedule. Reductions and gathers look at one rank's program at a time; the
transfers' pass looks at all, because receives must be posted before the sends, in their order.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from zeropp.schedule.action import MAKES_GRADIENTS, NEEDS_PARAMETERS, Action, Op
from zeropp.schedule.program import Program, Schedule, StageCost
from zeropp.sim import events

ReduceEvery = Literal["unit", "step"]


def lower(
    schedule: Schedule,
    *,
    gather: bool,
    prefetch: int = 1,
    keep: int = 0,
    reduce_every: ReduceEvery = "unit",
) -> Schedule:
    """The whole program of a schedule, ready to be run.

    ``gather``: parameters are sharded, so gathers and releases are added, each gather
    ``prefetch`` windows ahead of its use. ``keep``: parameters are released as soon as no window
    needs them (0), or that many chunks may stay gathered at once where that saves a gather; the
    one that is needed last goes first. On schedules without units a phase is the whole step's
    forwards or backwards of a stage. Gradients are reduced after the last weight gradient of
    a stage's unit, or of its step. Raises ValueError on a schedule that is lowered already.
    """
    if any(not a.op.is_compute for program in schedule.programs for a in program):
        raise ValueError(f"schedule {schedule.name} is lowered already")
    span = schedule.unit if reduce_every == "unit" else schedule.num_microbatches
    programs = [_add_reductions(program, span) for program in schedule.programs]
    if gather:
        programs = [_add_gathers(p, schedule.unit, prefetch, keep) for p in programs]
    return replace(schedule, programs=_add_transfers(programs, schedule))


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


def _add_gathers(program: Program, unit: int, prefetch: int, keep: int) -> Program:
    windows = parameter_windows(program, unit)
    uses: dict[int, list[int]] = defaultdict(list)  # stage -> its windows, by number
    for number, window in enumerate(windows):
        uses[window.stage].append(number)
    before: dict[int, list[Action]] = defaultdict(list)
    after: dict[int, list[Action]] = defaultdict(list)
    free_from: dict[int, int] = {}  # stage -> index from which it may be gathered again
    held: dict[int, Window] = {}  # gathered stages, by the latest window that uses them

    def release(stage: int) -> None:
        last = held.pop(stage).last
        after[last].append(Action(stage, Op.RESHARD))
        free_from[stage] = last + 1

    def next_use(stage: int, number: int) -> float:
        later = bisect_left(uses[stage], number)
        return uses[stage][later] if later < len(uses[stage]) else float("inf")

    for number, window in enumerate(windows):
        if window.stage not in held:
            place = windows[max(0, number - prefetch)].first
            place = max(place, free_from.get(window.stage, 0))
            if len(held) >= keep > 0:  # make room: give up what is needed last
                place = min(max(place, min(w.last for w in held.values()) + 1), window.first)
                idle = [stage for stage, w in held.items() if w.last < place]
                if idle:
                    release(max(idle, key=partial(next_use, number=number)))
            before[place].append(Action(window.stage, Op.UNSHARD))
        held[window.stage] = window
        if keep == 0:
            release(window.stage)
    for stage in list(held):
        release(stage)
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


def _add_transfers(programs: Sequence[Program], compute: Schedule) -> tuple[Program, ...]:
    """Sends right after their producer; receives posted early, and on each channel (ordered pair
    of ranks) in the order of the sends.

    A receive stands before the action that its rank runs, in the equal-cost run, while the message
    is sent, and at least one compute action ahead of its consumer. So there is one order of all
    actions in which every receive is posted before its send: even a transport that blocks each
    send until its receive is posted cannot deadlock, whatever the durations are.
    """
    result = events.run(compute, [StageCost()] * compute.num_stages)
    place = {
        (action.stage, action.op is Op.FORWARD, action.microbatch): index
        for program in compute.programs
        for index, action in enumerate(program)
        if action.op in NEEDS_PARAMETERS
    }
    before: list[dict[int, list[Action]]] = [defaultdict(list) for _ in programs]
    after: list[dict[int, list[Action]]] = [defaultdict(list) for _ in programs]
    for rank, program in enumerate(compute.programs):
        channels: dict[int, list[tuple[int, Action]]] = defaultdict(list)
        for index, action in enumerate(program):
            messages = _messages_of(action, compute.stage_rank)
            if messages is None:
                continue
            send, receive = messages
            after[rank][index].append(send)
            target = compute.stage_rank[receive.stage]
            consumer = place[receive.stage, receive.op is Op.RECV_F, receive.microbatch]
            running = bisect_left(result.end[target], result.end[rank][index])
            channels[target].append((min(running, max(consumer - 1, 0)), receive))
        for target, receives in channels.items():
            _post_in_order(receives, before[target])
    return tuple(
        _insert_at_compute(program, before[rank], after[rank])
        for rank, program in enumerate(programs)
    )


def _post_in_order(receives: list[tuple[int, Action]], before: dict[int, list[Action]]) -> None:
    """Add one channel's receives to a rank, none later than any that was sent after it."""
    places = [place for place, _ in receives]
    for number in range(len(places) - 2, -1, -1):
        places[number] = min(places[number], places[number + 1])
    for place, (_, receive) in zip(places, receives, strict=True):
        before[place].append(receive)


def _messages_of(action: Action, stage_rank: Sequence[int]) -> tuple[Action, Action] | None:
    """The send and the receive that follow a compute action, if its output leaves the rank."""
    stage = action.stage
    if action.op is Op.FORWARD and stage + 1 < len(stage_rank):
        ops, target = (Op.SEND_F, Op.RECV_F), stage + 1
    elif action.op in (Op.BACKWARD_INPUT, Op.FULL_BACKWARD) and stage > 0:
        ops, target = (Op.SEND_B, Op.RECV_B), stage - 1
    else:
        return None
    if stage_rank[target] == stage_rank[stage]:
        return None
    return Action(stage, ops[0], action.microbatch), Action(target, ops[1], action.microbatch)


def _insert(
    program: Program, before: dict[int, list[Action]], after: dict[int, list[Action]]
) -> Program:
    out: list[Action] = []
    for index, action in enumerate(program):
        out += before.get(index, ())
        out.append(action)
        out += after.get(index, ())
    return tuple(out)


def _insert_at_compute(
    program: Program, before: dict[int, list[Action]], after: dict[int, list[Action]]
) -> Program:
    """As ``_insert``, with places that count compute actions only."""
    out: list[Action] = []
    index = 0
    for action in program:
        if not action.op.is_compute:
            out.append(action)
            continue
        out += before.get(index, ())
        out.append(action)
        out += after.get(index, ())
        index += 1
    return tuple(out)


def _microbatch(action: Action) -> int:
    assert action.microbatch is not None
    return action.microbatch
