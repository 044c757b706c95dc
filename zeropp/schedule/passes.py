"""Lowering: add gradient reductions, parameter gathers and releases, transfers, and a step's end.

The input of ``lower`` is a schedule with compute actions alone. Reductions and gathers are added to
one rank's program at a time. Transfers need all programs at once, because a receive must be posted
before its message is sent, and in the order of the sends. ``with_step_end`` then adds what depends
on a plan's replicas and tied parameters; all contenders' plans go through it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from operator import itemgetter
from typing import NamedTuple

from zeropp.schedule import event_loop
from zeropp.schedule.program import (
    COMPUTE,
    MAKES_GRADIENTS,
    NEEDS_PARAMETERS,
    Action,
    Op,
    RankProgram,
    Schedule,
    StageCost,
    StepEnd,
    collector_paused,
)
from zeropp.types.literals import ReduceEvery


@collector_paused()
def lower(
    schedule: Schedule,
    *,
    gather: bool,
    prefetch: int = 1,
    reduce_every: ReduceEvery = "unit",
    kept: frozenset[Op] = frozenset(),
    offloaded: Collection[int] = (),
) -> Schedule:
    """The programs of a schedule up to the end of its passes.

    ``gather``: parameters are sharded, so they are gathered ``prefetch`` windows ahead of their
    use and released as soon as their window ends (see ``parameter_windows``, also for ``kept``).
    ``reduce_every``: gradients of a stage are reduced after its last weight gradient in a unit, or
    in the step. ``offloaded``: the stages whose tensors wait for their backward in the host's
    memory. Raises ValueError on a schedule that is lowered already.
    """
    if any(action[1] not in COMPUTE for program in schedule.programs for action in program):
        raise ValueError(f"schedule {schedule.name} is lowered already")
    programs = [
        with_collectives(
            schedule,
            rank,
            gather=gather,
            prefetch=prefetch,
            reduce_every=reduce_every,
            kept=kept,
            offloaded=offloaded,
        )
        for rank in range(schedule.num_ranks)
    ]
    return replace(schedule, programs=add_transfers(programs, schedule))


def with_collectives(
    schedule: Schedule,
    rank: int,
    *,
    gather: bool,
    prefetch: int,
    reduce_every: ReduceEvery,
    kept: frozenset[Op] = frozenset(),
    offloaded: Collection[int] = (),
) -> RankProgram:
    """One rank's program of compute actions with offload, gathers, releases and reductions, as in
    ``lower``. The program may be the beginning of a step; then gradients that are not complete in
    it are not reduced."""
    m = schedule.num_microbatches
    span = schedule.unit if reduce_every == "unit" else m
    program = add_reductions(schedule.programs[rank], span, m)
    program = add_gathers(program, schedule.unit, prefetch, kept=kept) if gather else program
    return add_offload(program, offloaded) if offloaded else program


@dataclass
class Window:
    """A part of a program, from index ``first`` to ``last``, for which a stage must be gathered."""

    stage: int
    first: int
    last: int


def parameter_windows(
    program: RankProgram,
    unit: int,
    needs: frozenset[Op] = NEEDS_PARAMETERS,
    kept: frozenset[Op] = frozenset(),
) -> list[Window]:
    """The windows in which a rank needs each stage's parameters, ordered by their beginnings.

    A phase is all forwards, or all input gradients, of one stage in one unit (in the whole step
    where a schedule has no units), as far as they need parameters (``needs``). Two phases of a
    stage are one window if they overlap, if no other phase begins between them, or if the first
    ends with an action that is ``kept``: the parameters stay, as where the last chunk turns to
    backward, and the first to the next unit.
    """
    phases: dict[tuple[int, int, bool], Window] = {}
    for index, (stage, op, microbatch) in enumerate(program):
        if op in needs and microbatch is not None:
            key = (stage, microbatch // unit, op is Op.FORWARD)
            if key in phases:
                phases[key].last = index
            else:
                phases[key] = Window(stage, index, index)
    windows: list[Window] = []
    open_window: dict[int, Window] = {}
    began = -1
    for phase in sorted(phases.values(), key=lambda w: w.first):
        window = open_window.get(phase.stage)
        stays = window is not None and program[window.last].op in kept
        if window is not None and (stays or min(began, phase.first) <= window.last):
            window.last = max(window.last, phase.last)
        else:
            open_window[phase.stage] = phase
            windows.append(phase)
        began = phase.first
    return windows


def add_gathers(
    program: RankProgram,
    unit: int,
    prefetch: int,
    needs: frozenset[Op] = NEEDS_PARAMETERS,
    kept: frozenset[Op] = frozenset(),
) -> RankProgram:
    """Gathers and releases around the windows of a rank's program (see ``lower``)."""
    windows, free_from = parameter_windows(program, unit, needs, kept), dict[int, int]()
    before, after = defaultdict[int, list[Action]](list), defaultdict[int, list[Action]](list)
    for number, window in enumerate(windows):
        place = max(windows[max(0, number - prefetch)].first, free_from.get(window.stage, 0))
        before[place].append(Action(window.stage, Op.UNSHARD))
        after[window.last].append(Action(window.stage, Op.RESHARD))
        free_from[window.stage] = window.last + 1
    return _insert(program, before, after)


def add_reductions(program: RankProgram, span: int, num_microbatches: int) -> RankProgram:
    made = defaultdict[tuple[int, int], list[int]](list)  # the places of weight gradients
    for index, (stage, op, microbatch) in enumerate(program):
        if op in MAKES_GRADIENTS and microbatch is not None:
            made[stage, microbatch // span].append(index)
    after: dict[int, list[Action]] = defaultdict(list)
    for (stage, part), places in made.items():
        if len(places) == min(span, num_microbatches - part * span):
            after[places[-1]].append(Action(stage, Op.REDUCE_GRAD))
    return _insert(program, {}, after)


_BESIDE = 2  # the most compute actions beside which a store runs before compute waits for it


def add_offload(program: RankProgram, stages: Collection[int]) -> RankProgram:
    """Stores, releases and loads of what microbatches keep in these ``stages`` of a rank.

    A store begins behind its forward, and its memory is freed behind the next forward of these
    stages, or a little sooner. A load begins before the backward that precedes its own. So at most
    two of each are on the device, one that is copied and one that is used. A microbatch that turns
    at once stays.
    """
    places = [index for index, action in enumerate(program) if action.op in COMPUTE]
    compute = [program[index] for index in places]
    backwards: dict[tuple[int, int | None], int] = {}  # to the place of the one before it
    before_it = 0
    for number, (stage, op, microbatch) in enumerate(compute):
        if op in NEEDS_PARAMETERS and op is not Op.FORWARD:
            backwards[stage, microbatch] = before_it
            before_it = number
    before, after = defaultdict[int, list[Action]](list), defaultdict[int, list[Action]](list)
    forwards = [n for n, a in enumerate(compute) if a.op is Op.FORWARD and a.stage in stages]
    for number, following in zip(forwards, (*forwards[1:], len(compute)), strict=False):
        stage, _, microbatch = compute[number]
        freed = min(following, number + _BESIDE, len(compute) - 1)
        loaded = backwards.get((stage, microbatch), len(compute))
        if loaded > freed + 1:
            after[places[number]].append(Action(stage, Op.STORE, microbatch))
            after[places[freed]].insert(0, Action(stage, Op.FREE, microbatch))
            if loaded < len(compute):
                before[places[loaded]].append(Action(stage, Op.LOAD, microbatch))
    return _insert(program, before, after)


def add_transfers(programs: Sequence[RankProgram], compute: Schedule) -> tuple[RankProgram, ...]:
    """Add sends right after the action that produces the message, and receives before its use.

    On each channel (an ordered pair of ranks) receives are posted in the order of the sends. To
    place them, the schedule is run once with equal durations: a receive is placed before the action
    that its rank is running when the message is sent, or before the one that needs it if the rank
    waits for it. So there is an order of all actions in which every receive is posted before its
    send: even a transport that blocks each send until its receive is posted cannot deadlock,
    whatever the real durations are. And all actions on which a message depends are issued before
    its receive: a host that waits for its device after any action does not wait for ever.
    """
    end = event_loop.run(compute, [StageCost()] * compute.num_stages).end
    places = _use_places(compute)
    routes = _routes(compute.stage_rank)
    sends: list[list[Action | None]] = [[None] * len(program) for program in compute.programs]
    receives: list[list[tuple[int, Action]]] = [[] for _ in programs]
    for rank, program in enumerate(compute.programs):
        channels: dict[int, list[tuple[int, Action]]] = defaultdict(list)
        for index, (stage, op, microbatch) in enumerate(program):
            route = routes.get((stage, op))
            if route is None or microbatch is None:
                continue
            sends[rank][index] = Action(stage, route.send, microbatch)
            running = bisect_left(end[route.rank], end[rank][index])
            needed = places[route.receive][route.stage][microbatch]
            receive = Action(route.stage, route.receive, microbatch)
            channels[route.rank].append((min(running, needed), receive))
        for target, channel in channels.items():
            # Forward, until their places are in the order of the sends.
            earliest = [*accumulate((place for place, _ in reversed(channel)), min)][::-1]
            receives[target] += zip(earliest, (action for _, action in channel), strict=True)
    return tuple(map(_insert_transfers, programs, sends, receives))


def with_step_end(schedule: Schedule, end: StepEnd) -> Schedule:
    """The whole step of a lowered schedule: reductions over the replicas, the sum of tied
    gradients, the update, and the gathers before and after it. They are added once for each
    ``end``."""
    if end not in schedule.ended:
        programs = tuple(
            _ended(program, schedule.stages_of(rank), end)
            for rank, program in enumerate(schedule.programs)
        )
        schedule.ended[end] = replace(schedule, programs=programs)
    return schedule.ended[end]


def _ended(program: RankProgram, stages: tuple[int, ...], end: StepEnd) -> RankProgram:
    """One rank's program, in which a stage's gradients are reduced over the replicas as soon as
    they are complete, so that all but the last of these reductions have compute beside them."""
    after: dict[int, list[Action]] = {}
    left = set(stages) if end.over_replicas else set()
    for index in range(len(program) - 1, -1, -1):
        stage, op, _ = program[index]
        if stage in left and (op is Op.REDUCE_GRAD or op in MAKES_GRADIENTS):
            after[index] = [Action(stage, Op.REDUCE_REPLICAS)]
            left.remove(stage)
        if not left:
            break
    tied = [Action(stage, Op.REDUCE_TIED) for stage in stages if stage in end.tied][:1]
    if tied and tied[0] in program:  # where the program's own order has put it
        tied = []
    whole = [Action(stages[0], Op.GATHER_WHOLE)] * end.gathers_whole
    return (
        *_insert(program, {}, after),
        *tied,
        *whole,
        Action(stages[0], Op.UPDATE),
        *[Action(stages[0], Op.GATHER_UPDATED)] * end.gathers_updated,
    )


class _Route(NamedTuple):
    """Where the output of a compute action is sent: to ``stage`` on ``rank``."""

    send: Op
    receive: Op
    stage: int
    rank: int


def _routes(stage_rank: Sequence[int]) -> dict[tuple[int, Op], _Route]:
    """The routes of all outputs that leave their rank, by stage and operation."""
    routes = {}
    for stage, (here, there) in enumerate(pairwise(stage_rank)):
        if here != there:
            routes[stage, Op.FORWARD] = _Route(Op.SEND_F, Op.RECV_F, stage + 1, there)
            back = _Route(Op.SEND_B, Op.RECV_B, stage, here)
            routes[stage + 1, Op.BACKWARD_INPUT] = routes[stage + 1, Op.FULL_BACKWARD] = back
    return routes


def _use_places(compute: Schedule) -> dict[Op, list[list[int]]]:
    """The place in its program of the action that needs each message: by kind of receive, then
    stage, then microbatch."""
    forward, backward = (
        [[0] * compute.num_microbatches for _ in range(compute.num_stages)] for _ in "FB"
    )
    for program in compute.programs:
        for place, (stage, op, microbatch) in enumerate(program):
            if op in NEEDS_PARAMETERS and microbatch is not None:
                (forward if op is Op.FORWARD else backward)[stage][microbatch] = place
    return {Op.RECV_F: forward, Op.RECV_B: backward}


def _insert(
    program: RankProgram, before: dict[int, list[Action]], after: dict[int, list[Action]]
) -> RankProgram:
    out: list[Action] = []
    begin = 0
    for index in sorted({*before, *after}):
        out += program[begin:index]
        out += before.get(index, ())
        out.append(program[index])
        out += after.get(index, ())
        begin = index + 1
    return (*out, *program[begin:])


def _insert_transfers(
    program: RankProgram, sends: Sequence[Action | None], receives: list[tuple[int, Action]]
) -> RankProgram:
    """Insert receives before, and sends after, the compute action at their place. Places count
    compute actions alone."""
    receives.sort(key=itemgetter(0))
    out: list[Action] = []
    index = posted = 0
    for action in program:
        if action.op not in COMPUTE:
            out.append(action)
            continue
        while posted < len(receives) and receives[posted][0] <= index:
            out.append(receives[posted][1])
            posted += 1
        out.append(action)
        send = sends[index]
        if send is not None:
            out.append(send)
        index += 1
    return tuple(out)
