"""A schedule: one program of actions for every pipeline rank, and the rank of every stage."""

from __future__ import annotations

import csv
import gc
import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import NamedTuple

# The vocabulary of a pipeline program: one frozen action, and its text form.
#
# The names and the text form are those of ``torch.distributed.pipelining`` (``0F3``, ``0I3``,
# ``0W3``, ``0B3``, ``0UNSHARD``, ``0SEND_F3`` ...), so that a program written here can be run by
# torch's own runtime and compared. For the end of a step (``0REDUCE_REPLICAS``, ``0UPDATE`` ...)
# torch has no actions; DeepSpeed has instructions.


class Op(StrEnum):
    """What an action does to its stage. The value is the abbreviation that torch uses."""

    FORWARD = "F"
    BACKWARD_INPUT = "I"  # gradient of the stage's input only
    BACKWARD_WEIGHT = "W"  # gradient of the stage's parameters, from tensors that "I" has kept
    FULL_BACKWARD = "B"  # both at once
    UNSHARD = "UNSHARD"  # gather the stage's parameters over its shard group
    RESHARD = "RESHARD"  # release the gathered parameters
    REDUCE_GRAD = "REDUCE_GRAD"  # reduce-scatter the stage's accumulated gradients
    REDUCE_REPLICAS = "REDUCE_REPLICAS"  # then sum them over the replicas of the shard group
    REDUCE_TIED = "REDUCE_TIED"  # sum the gradients of a parameter that two stages share
    GATHER_WHOLE = "GATHER_WHOLE"  # bring what is updated whole to the ranks that update it
    UPDATE = "UPDATE"  # clip by the global norm and step the optimizer, for all stages of the rank
    GATHER_UPDATED = "GATHER_UPDATED"  # gather what other ranks have updated (whole; ZeRO-1)
    SEND_F = "SEND_F"  # activation to the next stage
    RECV_F = "RECV_F"  # activation from the previous stage
    SEND_B = "SEND_B"  # gradient to the previous stage
    RECV_B = "RECV_B"  # gradient from the next stage
    STORE = "STORE"  # begin to copy what a forward has left to the host's memory
    FREE = "FREE"  # once that is done, free the device's
    LOAD = "LOAD"  # begin to copy it back

    @property
    def is_compute(self) -> bool:
        """True for actions that occupy the compute stream."""
        return self in COMPUTE

    @property
    def is_transfer(self) -> bool:
        """True for point-to-point sends and receives."""
        return self in TRANSFER

    @property
    def has_microbatch(self) -> bool:
        """True for compute, transfers and offload; other actions concern all microbatches."""
        return self in COMPUTE or self in TRANSFER or self in OFFLOAD


# Forwards and backwards. Tied sums and updates stand in line with them, but are no passes.
COMPUTE = frozenset({Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT, Op.FULL_BACKWARD})
TRANSFER = frozenset({Op.SEND_F, Op.RECV_F, Op.SEND_B, Op.RECV_B})
OFFLOAD = frozenset({Op.STORE, Op.FREE, Op.LOAD})  # of activations, to the host's memory and back
COLLECTIVE = frozenset({Op.UNSHARD, Op.REDUCE_GRAD, Op.REDUCE_REPLICAS})  # run beside compute
OF_RANK = frozenset({Op.GATHER_WHOLE, Op.UPDATE, Op.GATHER_UPDATED})  # for all of its stages
STEP_END = OF_RANK | {Op.REDUCE_REPLICAS, Op.REDUCE_TIED}

NEEDS_PARAMETERS = frozenset({Op.FORWARD, Op.BACKWARD_INPUT, Op.FULL_BACKWARD})
MAKES_GRADIENTS = frozenset({Op.BACKWARD_WEIGHT, Op.FULL_BACKWARD})

_PATTERN = re.compile(rf"(\d+)({'|'.join(Op)})(\d*)")


class Action(NamedTuple):
    """One step of one rank's program.

    ``stage`` is the global index of the stage, from 0 to P*V-1; an action that concerns all stages
    of its rank (those in ``OF_RANK``) names the first of them. ``microbatch`` is None for
    the actions that concern parameters as a whole, and a number for all others. This is a tuple
    and not a dataclass because a training step of 64 ranks has a million actions.
    """

    stage: int
    op: Op
    microbatch: int | None = None

    def __str__(self) -> str:
        return f"{self.stage}{self.op}{'' if self.microbatch is None else self.microbatch}"


@contextmanager
def collector_paused() -> Iterator[None]:
    """Switch the garbage collector off while very many actions are created.

    Actions hold no reference cycles, so there is nothing for it to find; but it would walk through
    all of them again and again, which takes most of the time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def parse_action(text: str) -> Action:
    """Read one action in torch's text form. Raises ValueError if the text is no action."""
    match = _PATTERN.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"not an action: {text!r} (examples: 0F3, 2I1, 1UNSHARD, 0SEND_F3)")
    stage, op, microbatch = match.groups()
    if Op(op).has_microbatch != bool(microbatch):
        need = "needs a" if Op(op).has_microbatch else "takes no"
        raise ValueError(f"not an action: {text!r} ({op} {need} microbatch)")
    return Action(int(stage), Op(op), int(microbatch) if microbatch else None)


# The order in which the actions of all ranks can be timed: each after those that it waits for.
#
# Which action waits for which does not depend on durations. So this order is found once per
# schedule, and the event loop then goes through it once for every set of durations.


# States of an input: nothing has happened, its receive is posted, its message is sent, it is here.
_NOTHING, _POSTED, _SENT, _HERE = range(4)
_DONE = 4  # the input gradient that used it has been computed

_FORWARD_SIDE = frozenset({Op.FORWARD, Op.RECV_F})
_SENDS = frozenset({Op.SEND_F, Op.SEND_B})
_RECEIVES = frozenset({Op.RECV_F, Op.RECV_B})


class DeadlockError(ValueError):
    """The programs wait for each other. Rank r stopped at index ``stuck[r]`` of its program."""

    def __init__(self, message: str, stuck: tuple[int, ...]) -> None:
        super().__init__(message)
        self.stuck = stuck


@dataclass(frozen=True)
class ActionSequence:
    """The actions of all programs, in an order in which each one's inputs come before it; actions
    of one rank keep the order of its program."""

    actions: tuple[Action, ...]
    num_microbatches: int  # one more than the largest number of a microbatch
    has_transfers: bool  # False: compute actions alone, whose outputs reach the next stage anyway
    pair_streams: bool = False  # see ``Schedule.pair_streams``; sends then stand before receives
    has_loads: bool = False  # some activations come back from the host's memory


class _OrderSearch:
    """Runs every rank as far as its inputs allow. The inputs of forwards are numbered ``stage *
    microbatches + microbatch``, and those of backwards follow, after a spare row."""

    def __init__(
        self, programs: Sequence[Sequence[Action]], stage_rank: Sequence[int], pair_streams: bool
    ) -> None:
        self._programs, self._last = programs, len(stage_rank) - 1
        self._pair_streams = pair_streams
        numbers = (action.microbatch or 0 for program in programs for action in program)
        self._m = 1 + max(numbers, default=0)
        self._back = (len(stage_rank) + 1) * self._m
        self._inputs = bytearray(2 * self._back)
        self._inputs[: self._m] = bytes([_HERE]) * self._m
        kinds = {action.op for program in programs for action in program}
        self._lowered, self._loads = bool(kinds & TRANSFER), Op.LOAD in kinds
        # Whether a stage's output reaches the next stage without a send, and the other way round.
        self._direct = [not self._lowered or a == b for a, b in pairwise(stage_rank)]
        self._waiting: dict[int, int] = {}  # input -> rank that waits for it
        self._position = [0] * len(programs)
        self._runnable = list(range(len(programs) - 1, -1, -1))
        self._order: list[Action] = []

    def result(self) -> ActionSequence:
        while self._runnable:
            self._advance(self._runnable.pop())
        stuck = tuple(self._position)
        where = [
            f"rank {r} at {p[stuck[r]]}" for r, p in enumerate(self._programs) if stuck[r] < len(p)
        ]
        if where:
            raise DeadlockError(f"deadlock: {', '.join(where)}", stuck)
        return ActionSequence(
            tuple(self._order), self._m, self._lowered, self._pair_streams, self._loads
        )

    def _advance(self, rank: int) -> None:
        """Run one rank until its program ends or it has to wait for another rank."""
        inputs, m, begin = self._inputs, self._m, self._position[rank]
        program, place = self._programs[rank], begin
        while place < len(program):
            stage, op, microbatch = program[place]
            if microbatch is not None and op not in OFFLOAD:
                key = stage * m + microbatch
                if op in _SENDS:  # what is sent before its receive is posted is kept
                    key = key + m if op is Op.SEND_F else self._back + key - m
                    self._arrive(key, _HERE if inputs[key] == _POSTED else _SENT)
                else:
                    key += 0 if op in _FORWARD_SIDE else self._back
                    if op is Op.BACKWARD_WEIGHT:
                        if inputs[key] != _DONE:
                            break  # its input gradient stands later in the same program
                    elif op in _RECEIVES and (inputs[key] == _SENT or not self._pair_streams):
                        inputs[key] = _HERE if inputs[key] == _SENT else _POSTED
                    elif inputs[key] < _HERE:
                        self._waiting[key] = rank
                        break
                    else:
                        self._output(stage, op, key)
            place += 1
        self._order += program[begin:place]
        self._position[rank] = place

    def _output(self, stage: int, op: Op, key: int) -> None:
        """Pass on the output of a forward or backward, unless a send does it."""
        if op is not Op.FORWARD:
            self._inputs[key] = _DONE
            if stage > 0 and self._direct[stage - 1]:
                self._arrive(key - self._m)
        elif stage == self._last:
            self._arrive(self._back + key)
        elif self._direct[stage]:
            self._arrive(key + self._m)

    def _arrive(self, key: int, state: int = _HERE) -> None:
        """Note that an input is here, or sent, and wake the rank that waits for it."""
        self._inputs[key] = state
        if key in self._waiting:
            self._runnable.append(self._waiting.pop(key))


RankProgram = tuple[Action, ...]  # what one rank does in a step, in order


@dataclass(frozen=True, kw_only=True)
class StageCost:
    """Durations of one stage's actions, in seconds (or any other unit, the same for all).

    ``forward``, ``backward_input`` and ``backward_weight`` are for one microbatch; recomputation,
    where there is any, is part of ``backward_input``. ``unshard`` and ``reduce_grad`` are one
    gather of the stage's parameters and one reduce-scatter of its gradients. ``transfer`` is one
    boundary tensor between this stage and the next, in either direction. ``copy_out`` and
    ``copy_in`` are the time that a gather and a reduction take away from compute, to move
    parameters out of the collective's buffer and gradients into it. ``store`` and ``load`` are one
    copy of what a microbatch leaves in the stage to the host's memory, and back.

    ``reduce_replicas`` is the reduction of the stage's gradients over the replicas (an all-reduce,
    or a reduce-scatter with ZeRO-1), and ``reduce_tied`` the sum of those that it shares with
    another stage. ``gather_whole``, ``update`` and ``gather_updated`` are those of a whole rank:
    they stand in its first stage, and are 0 in its others.
    """

    forward: float = 1.0
    backward_input: float = 1.0
    backward_weight: float = 1.0
    unshard: float = 0.0
    reduce_grad: float = 0.0
    transfer: float = 0.0
    copy_out: float = 0.0
    copy_in: float = 0.0
    store: float = 0.0
    load: float = 0.0
    reduce_replicas: float = 0.0
    reduce_tied: float = 0.0
    gather_whole: float = 0.0
    update: float = 0.0
    gather_updated: float = 0.0
    waits_for_reduction: bool = False  # compute waits until the stage's gradients are reduced
    # The parts in which they are reduced. Several have one buffer for all chunks of a rank.
    parts: int = 1
    again: float = 0.0  # of a backward, before its first weight gradient: what is recomputed

    @property
    def compute(self) -> float:
        """Forward and backward of one microbatch, copies aside."""
        return self.forward + self.backward_input + self.backward_weight


@dataclass(frozen=True)
class StepEnd:
    """What follows a step's passes. ``over_replicas``: gradients are reduced over replicas;
    ``tied``: the two stages that share a parameter, or none; ``gathers_updated``: ranks gather what
    others have updated, as each replica updates a part of the parameters (ZeRO-1), or as ranks
    update whole ones, which they have gathered before it (``gathers_whole``)."""

    over_replicas: bool = False
    tied: tuple[int, ...] = ()
    gathers_updated: bool = False
    gathers_whole: bool = False


@dataclass(frozen=True, kw_only=True)
class ScheduleSizes:
    """What is known of a schedule before its order of actions: its name, and its sizes for one
    optimizer step.

    ``stage_rank[s]`` is the pipeline rank that holds stage ``s``; stages are numbered in the
    order in which data flows through them. ``unit`` is the number of microbatches for which a
    chunk's parameters are gathered once (all of them where a schedule has no units).
    """

    name: str
    num_microbatches: int
    unit: int
    stage_rank: tuple[int, ...]

    @property
    def num_stages(self) -> int:
        """Number of stages over all ranks, P*V."""
        return len(self.stage_rank)

    @property
    def num_ranks(self) -> int:
        """Number of pipeline ranks, P."""
        return len(_stages_by_rank(self.stage_rank))

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that pipeline rank ``rank`` holds, in data-flow order."""
        return _stages_by_rank(self.stage_rank)[rank]


@dataclass(frozen=True, kw_only=True)
class Schedule(ScheduleSizes):
    """Programs of all pipeline ranks for one optimizer step.

    ``programs[r]`` lists rank r's actions in the order in which they are issued: a gather, a
    reduction or a transfer starts once the compute actions listed before it have ended.
    """

    programs: tuple[RankProgram, ...]
    # Messages between two ranks, of both directions, take turns in the order of their programs, and
    # a receive that is posted before its message is sent holds up those behind it: NCCL's messages
    # between two ranks have one stream, and torch's runtime has one group for all of them.
    pair_streams: bool = False

    @cached_property
    def sequence(self) -> ActionSequence:
        """All actions in an order in which they can be timed. Raises DeadlockError where the
        programs wait for each other."""
        return _OrderSearch(self.programs, self.stage_rank, self.pair_streams).result()

    @cached_property
    def collectives(self) -> tuple[RankProgram, ...]:
        """What every rank gathers and reduces beside its compute, in the order of its program."""
        return tuple(
            tuple(action for action in program if action[1] in COLLECTIVE)
            for program in self.programs
        )

    @cached_property
    def ended(self) -> dict[StepEnd, Schedule]:
        """The same programs with the ends that were asked for (``passes.with_step_end``). Many
        plans that differ in other degrees share them."""
        return {}

    @cached_property
    def lone(self) -> dict[tuple[object, ...], Schedule]:
        """Programs of single ranks with what was asked for (``zeropp.choose.bounds.order_peak``),
        which many plans share, too."""
        return {}

    def to_csv(self) -> str:
        """The CSV form that torch reads and writes: one line per rank, one action per cell."""
        out = io.StringIO()
        rows = ([str(action) for action in for_torch(program)] for program in self.programs)
        csv.writer(out, lineterminator="\n").writerows(rows)
        return out.getvalue()


def for_torch(program: RankProgram) -> RankProgram:
    """The actions that torch's runtime knows, which leaves the end of a step to its caller and
    sends nothing to the host."""
    return tuple(action for action in program if action.op not in STEP_END | OFFLOAD)


def before_reductions(program: RankProgram) -> frozenset[Action]:
    """The last weight gradient of a stage before each of its reductions."""
    latest: dict[int, Action] = {}
    found = set[Action]()
    for action in program:
        if action.op in MAKES_GRADIENTS:
            latest[action.stage] = action
        elif action.op is Op.REDUCE_GRAD:
            found.add(latest[action.stage])
    return frozenset(found)


def merged_weights(program: RankProgram, most: int) -> dict[Action, tuple[int, ...]]:
    """The microbatches whose weight gradients are computed at each action of that kind: of up to
    ``most`` that follow each other in a stage all at the last one, and none at the others."""
    groups: list[list[Action]] = [[]]
    for action in program:
        if action.op is Op.BACKWARD_WEIGHT:
            last = groups[-1]
            if last and (last[0].stage != action.stage or len(last) == most):
                groups.append([])
            groups[-1].append(action)
        elif action.op in COMPUTE or action.op is Op.REDUCE_GRAD:
            groups.append([])
    found = dict[Action, tuple[int, ...]]()
    for group in filter(None, groups):
        found |= dict.fromkeys(group, ())
        found[group[-1]] = tuple(a.microbatch for a in group if a.microbatch is not None)
    return found


@lru_cache(maxsize=1024)
def _stages_by_rank(stage_rank: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    ranks: list[list[int]] = [[] for _ in range(max(stage_rank) + 1)]
    for stage, rank in enumerate(stage_rank):
        ranks[rank].append(stage)
    return tuple(map(tuple, ranks))


def unordered(
    name: str, stage_rank: tuple[int, ...], num_microbatches: int, unit: int | None = None
) -> ScheduleSizes:
    """The sizes of a schedule whose order of actions is not chosen yet; the cost model needs no
    more. ``unit`` is all microbatches of the step by default."""
    return ScheduleSizes(
        name=name,
        num_microbatches=num_microbatches,
        unit=num_microbatches if unit is None else unit,
        stage_rank=stage_rank,
    )


@lru_cache(maxsize=1024)
def loop_placement(num_ranks: int, chunks: int) -> tuple[int, ...]:
    """Stage ``s`` on rank ``s mod P``: the placement of interleaved and breadth-first schedules."""
    return tuple(s % num_ranks for s in range(num_ranks * chunks))


@lru_cache(maxsize=1024)
def v_placement(num_ranks: int, chunks: int = 2) -> tuple[int, ...]:
    """Down the ranks and up again, chunk by chunk: ``0 1 .. P-1 P-1 .. 1 0 0 1 ..``.

    With two chunks per rank this is the placement of ZBV (arXiv 2401.10241).
    """
    down = [*range(num_ranks)]
    return tuple(
        rank for chunk in range(chunks) for rank in (down if chunk % 2 == 0 else down[::-1])
    )
