"""Refuses programs that are illegal, deadlock or need too much memory, before anything runs."""

from __future__ import annotations

from collections import Counter
from itertools import product

from zeropp.schedule.program import (
    COMPUTE,
    MAKES_GRADIENTS,
    NEEDS_PARAMETERS,
    DeadlockError,
    Op,
    Schedule,
    collector_paused,
    sequence_of,
)

_COLUMNS = 12  # shown on each side of the bad cell

_PARTS = {op: (op,) for op in COMPUTE} | {Op.FULL_BACKWARD: (Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)}


class ScheduleError(ValueError):
    """A program that must not run. The message ends with an excerpt of all ranks' programs, in
    which the bad action is marked with [[ ]]."""


@collector_paused()
def validate(schedule: Schedule, *, activation_cap: int | None = None) -> None:
    """Check a schedule, with compute actions alone or lowered. Raises ScheduleError.

    Checked are: every action is on the rank of its stage; every forward, input gradient and weight
    gradient is there exactly once; dependencies are kept and there is no deadlock; no rank has more
    than ``activation_cap`` live chunk-activations. In a lowered program also: parameters are
    gathered wherever they are used, at most once per chunk, unit and phase, and never while they
    are gathered already; and all gradients are reduced once they are complete.
    """
    _check_each_action_once(schedule)
    try:
        sequence_of(schedule.programs, schedule.stage_rank)
    except DeadlockError as error:
        rank = next(r for r, p in enumerate(schedule.programs) if error.stuck[r] < len(p))
        raise _error(schedule, rank, error.stuck[rank], str(error)) from None
    if activation_cap is not None:
        _check_cap(schedule, activation_cap)
    if any(a.op is Op.UNSHARD for program in schedule.programs for a in program):
        _check_gathers(schedule)
    if any(a.op is Op.REDUCE_GRAD for program in schedule.programs for a in program):
        _check_reductions(schedule)


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
                owner = schedule.stage_rank[stage]
                raise _error(schedule, rank, index, f"{action} belongs to rank {owner}")
            if op not in COMPUTE:
                continue
            for part in _PARTS[op]:
                done = (stage, part, microbatch)
                if done in seen or microbatch not in range(schedule.num_microbatches):
                    raise _error(schedule, rank, index, f"{action} is repeated")
                seen.add(done)
    parts = (Op.FORWARD, *_PARTS[Op.FULL_BACKWARD])
    for stage, part, microbatch in product(
        range(schedule.num_stages), parts, range(schedule.num_microbatches)
    ):
        if (stage, part, microbatch) not in seen:
            rank = schedule.stage_rank[stage]
            end = len(schedule.programs[rank]) - 1
            raise _error(schedule, rank, end, f"{stage}{part}{microbatch} is missing")


def _check_cap(schedule: Schedule, cap: int) -> None:
    for rank in range(schedule.num_ranks):
        counts = live_activations(schedule, rank)
        if max(counts) > cap:
            index = next(i for i, live in enumerate(counts) if live > cap)
            why = f"{counts[index]} live chunk-activations, but only {cap} are allowed"
            raise _error(schedule, rank, index, why)


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
            why = f"gradients of stages {left} are never reduced"
            raise _error(schedule, rank, len(program) - 1, why)


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
