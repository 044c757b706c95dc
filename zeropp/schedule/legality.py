"""Refuses programs that are illegal, deadlock or need too much memory, before anything runs."""

from __future__ import annotations

from collections import Counter
from itertools import product

from zeropp.schedule.program import (
    COLLECTIVE,
    COMPUTE,
    MAKES_GRADIENTS,
    NEEDS_PARAMETERS,
    OF_RANK,
    OFFLOAD,
    STEP_END,
    Action,
    DeadlockError,
    Op,
    Schedule,
    StepEnd,
    collector_paused,
)

_COLUMNS = 12  # shown on each side of the bad cell

_PARTS = {op: (op,) for op in COMPUTE} | {Op.FULL_BACKWARD: (Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)}


class ScheduleError(ValueError):
    """A program that must not run. The message ends with an excerpt of all ranks' programs, in
    which the bad action is marked with [[ ]]."""


@collector_paused()
def validate(
    schedule: Schedule, *, activation_cap: int | None = None, end: StepEnd | None = None
) -> None:
    """Check a schedule, with compute actions alone or lowered. Raises ScheduleError.

    Checked are: every action is on the rank of its stage; every forward, input gradient and weight
    gradient is there exactly once; dependencies are kept and there is no deadlock; no rank has more
    than ``activation_cap`` live chunk-activations. In a lowered program also: parameters are
    gathered wherever they are used, at most once per chunk, unit and phase, and never while they
    are gathered already; all gradients are reduced once they are complete; and what is stored in
    the host's memory was computed, and is freed and loaded before it is used. In the programs of
    a whole step also: every rank updates once, after all reductions; and where the plan's ``end``
    is given, every rank has what it asks for, and no more.
    """
    _check_each_action_once(schedule)
    try:
        _ = schedule.sequence
    except DeadlockError as error:
        rank = next(r for r, p in enumerate(schedule.programs) if error.stuck[r] < len(p))
        raise _error(schedule, rank, error.stuck[rank], str(error)) from None
    for rank in range(schedule.num_ranks if activation_cap is not None else 0):
        counts = live_activations(schedule, rank)
        if activation_cap is not None and max(counts) > activation_cap:
            index = next(i for i, live in enumerate(counts) if live > activation_cap)
            why = f"{counts[index]} live chunk-activations, but only {activation_cap} are allowed"
            raise _error(schedule, rank, index, why)
    if any(a.op is Op.UNSHARD for program in schedule.programs for a in program):
        _check_gathers(schedule)
    if any(a.op is Op.REDUCE_GRAD for program in schedule.programs for a in program):
        _check_reductions(schedule)
    if any(a.op in OFFLOAD for program in schedule.programs for a in program):
        _check_offload(schedule)
    if any(a.op in STEP_END for program in schedule.programs for a in program):
        _check_step_end(schedule)
    if end is not None:
        _check_asked_end(schedule, end)


def live_activations(schedule: Schedule, rank: int) -> list[int]:
    """Number of live chunk-activations after each action of a rank; each is live from its forward
    to its weight gradient."""
    live, counts = 0, []
    for action in schedule.programs[rank]:
        live += action.op is Op.FORWARD
        live -= action.op in MAKES_GRADIENTS
        counts.append(live)
    return counts


def resident_chunks(schedule: Schedule, rank: int) -> list[int]:
    """Number of chunks whose parameters are gathered, or being gathered, after each action."""
    resident, counts = 0, []
    for action in schedule.programs[rank]:
        resident += action.op is Op.UNSHARD
        resident -= action.op is Op.RESHARD
        counts.append(resident)
    return counts


def _check_each_action_once(schedule: Schedule) -> None:
    seen: set[tuple[int, Op, int | None]] = set()
    for rank, program in enumerate(schedule.programs):
        for index, action in enumerate(program):
            stage, op, microbatch = action
            if schedule.stage_rank[stage] != rank:
                raise _error(
                    schedule, rank, index, f"{action} belongs to rank {schedule.stage_rank[stage]}"
                )
            if op not in COMPUTE:
                continue
            for part in _PARTS[op]:
                done = (stage, part, microbatch)
                if done in seen or microbatch not in range(schedule.num_microbatches):
                    raise _error(schedule, rank, index, f"{action} is repeated")
                seen.add(done)
    for stage, part, microbatch in product(
        range(schedule.num_stages),
        (Op.FORWARD, *_PARTS[Op.FULL_BACKWARD]),
        range(schedule.num_microbatches),
    ):
        if (stage, part, microbatch) not in seen:
            rank = schedule.stage_rank[stage]
            raise _error(
                schedule,
                rank,
                len(schedule.programs[rank]) - 1,
                f"{stage}{part}{microbatch} is missing",
            )


def _check_gathers(schedule: Schedule) -> None:
    for rank, program in enumerate(schedule.programs):
        resident: set[int] = set()
        gathers = 0
        for index, action in enumerate(program):
            if action.op is Op.UNSHARD:
                gathers += 1
                if action.stage in resident:
                    raise _error(schedule, rank, index, f"stage {action.stage} is gathered already")
                resident.add(action.stage)
            elif action.op is Op.RESHARD:
                resident.discard(action.stage)
            elif action.op in NEEDS_PARAMETERS and action.stage not in resident:
                raise _error(schedule, rank, index, f"{action} without its parameters")
        units = -(-schedule.num_microbatches // schedule.unit)
        allowed = 2 * units * len(schedule.stages_of(rank))
        if gathers > allowed or resident:
            why = f"{gathers} gathers, but {allowed} allowed; never released: {sorted(resident)}"
            raise _error(schedule, rank, len(program) - 1, why)


def _check_reductions(schedule: Schedule) -> None:
    for rank, program in enumerate(schedule.programs):
        unreduced: Counter[int] = Counter()
        for index, action in enumerate(program):
            if action.op in MAKES_GRADIENTS:
                unreduced[action.stage] += 1
            elif action.op is Op.REDUCE_GRAD:
                if not unreduced[action.stage]:
                    raise _error(schedule, rank, index, f"{action} has nothing to reduce")
                unreduced[action.stage] = 0
        left = [stage for stage, count in unreduced.items() if count]
        if left:
            raise _error(
                schedule, rank, len(program) - 1, f"gradients of stages {left} are never reduced"
            )


_AFTER = {Op.STORE: Op.FORWARD, Op.FREE: Op.STORE, Op.LOAD: Op.FREE}  # what comes just before each


def _check_offload(schedule: Schedule) -> None:
    """Check that whatever is stored has been computed and is freed once, then loaded once, and then
    used."""
    for rank, program in enumerate(schedule.programs):
        last: dict[tuple[int, int | None], Op] = {}  # that concerned a stage's microbatch
        for index, action in enumerate(program):
            stage, op, microbatch = action
            before = last.get((stage, microbatch))
            if op in OFFLOAD and before is not _AFTER[op]:
                why = f"{action} must follow {stage}{_AFTER[op]}{microbatch}"
                raise _error(schedule, rank, index, why)
            if op in NEEDS_PARAMETERS and before in (Op.STORE, Op.FREE):
                raise _error(schedule, rank, index, f"{action} without {stage}LOAD{microbatch}")
            if op in COMPUTE or op in OFFLOAD:
                last[stage, microbatch] = op


def _check_step_end(schedule: Schedule) -> None:
    """Check what follows the passes: sums over replicas and of tied gradients, once each and of
    complete gradients; then one update; the gathers around it are on all ranks or on none."""
    everywhere = {action.op for program in schedule.programs for action in program}
    tied = [a for program in schedule.programs for a in program if a.op is Op.REDUCE_TIED]
    for rank, program in enumerate(schedule.programs):
        stages = schedule.stages_of(rank)
        done: set[Action] = set()
        for index, action in enumerate(program):
            if why := _step_end_error(action, stages, done, shards=Op.UNSHARD in everywhere):
                raise _error(schedule, rank, index, why)
            if action.op in STEP_END and action in done:
                raise _error(schedule, rank, index, f"{action} is repeated")
            if tied == [action] and len(stages) == 1:
                raise _error(schedule, rank, index, f"{action} has no other stage to add")
            done.add(action)
        left = [stage for stage in stages if Action(stage, Op.REDUCE_REPLICAS) not in done]
        if left and Op.REDUCE_REPLICAS in everywhere:
            why = f"gradients of stages {left} are not reduced over the replicas"
            raise _error(schedule, rank, len(program) - 1, why)
        for op in (Op.UPDATE, *sorted((OF_RANK - {Op.UPDATE}) & everywhere)):
            if (action := Action(stages[0], op)) not in done:
                raise _error(schedule, rank, len(program) - 1, f"there is no {action}")


def _step_end_error(
    action: Action, stages: tuple[int, ...], done: set[Action], *, shards: bool
) -> str:
    """Why a rank with these stages cannot have this action next, after all that is ``done``; empty
    if it can. A tied sum waits for all gradients of its rank, which may have both of its stages,
    and, where parameters are ``shards``, for their reductions, as it adds reduced gradients."""
    stage, op, _ = action
    updated = Action(stages[0], Op.UPDATE) in done
    if op in OF_RANK and stage != stages[0]:
        return f"{action} must name stage {stages[0]}"
    if (op is Op.GATHER_UPDATED) != updated:
        return f"{action} {'after the update' if updated else 'before the update'}"
    sums: list[Action] = []
    if op in MAKES_GRADIENTS | {Op.REDUCE_GRAD}:
        sums.append(Action(stage, Op.REDUCE_REPLICAS))
    if op in MAKES_GRADIENTS or (shards and op in COLLECTIVE - {Op.UNSHARD}):
        sums += [Action(held, Op.REDUCE_TIED) for held in stages]
    if op in MAKES_GRADIENTS | (COLLECTIVE - {Op.UNSHARD}) | {Op.REDUCE_TIED}:
        sums.append(Action(stages[0], Op.GATHER_WHOLE))
    if early := [str(each) for each in sums if each in done]:
        return f"{action} after {early[0]}"
    return ""


def _check_asked_end(schedule: Schedule, end: StepEnd) -> None:
    """Check that every rank has the actions after the passes that its plan asks for, and no
    others. Of two tied stages on one rank the first stands for both."""
    for rank, program in enumerate(schedule.programs):
        stages = schedule.stages_of(rank)
        asked = {Action(stages[0], Op.UPDATE)}
        asked |= {Action(s, Op.REDUCE_TIED) for s in [s for s in stages if s in end.tied][:1]}
        if end.over_replicas:
            asked |= {Action(stage, Op.REDUCE_REPLICAS) for stage in stages}
        around = {Op.GATHER_WHOLE: end.gathers_whole, Op.GATHER_UPDATED: end.gathers_updated}
        asked |= {Action(stages[0], op) for op, is_asked in around.items() if is_asked}
        here = {action for action in program if action.op in STEP_END}
        for action in sorted(asked ^ here):
            why = f"the plan asks for {action}" if action in asked else f"the plan has no {action}"
            place = program.index(action) if action in here else len(program) - 1
            raise _error(schedule, rank, place, why)


def _error(schedule: Schedule, rank: int, index: int, why: str) -> ScheduleError:
    first = max(0, index - _COLUMNS)
    lines = [f"schedule {schedule.name}, rank {rank}, action {index}: {why}"]
    for r, program in enumerate(schedule.programs):
        cells = [
            f"[[{action}]]" if (r, first + i) == (rank, index) else str(action)
            for i, action in enumerate(program[first : index + _COLUMNS])
        ]
        lines.append(f"rank {r} from {first}: " + " ".join(cells))
    return ScheduleError("\n".join(lines))
