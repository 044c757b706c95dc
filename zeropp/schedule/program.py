"""A schedule: one program of actions for every pipeline rank, and the rank of every stage."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from functools import cached_property, lru_cache

from zeropp.literals import StageStyle
from zeropp.schedule.action import COLLECTIVE, COMPLETES, Action
from zeropp.schedule.sequence import ActionSequence, sequence_of

Program = tuple[Action, ...]


@dataclass(frozen=True, kw_only=True)
class StageCost:
    """Durations of one stage's actions, in seconds (or any other unit, the same for all).

    ``forward``, ``backward_input`` and ``backward_weight`` are for one microbatch; recomputation,
    where there is any, is part of ``backward_input``. ``unshard`` and ``reduce_grad`` are one
    gather of the stage's parameters and one reduce-scatter of its gradients. ``transfer`` is one
    boundary tensor between this stage and the next, in either direction. ``copy_out`` and
    ``copy_in`` are the time that a gather and a reduction take away from compute, to move
    parameters out of the collective's buffer and gradients into it.
    """

    forward: float = 1.0
    backward_input: float = 1.0
    backward_weight: float = 1.0
    unshard: float = 0.0
    reduce_grad: float = 0.0
    transfer: float = 0.0
    copy_out: float = 0.0
    copy_in: float = 0.0

    @property
    def compute(self) -> float:
        """Forward and backward of one microbatch, copies aside."""
        return self.forward + self.backward_input + self.backward_weight


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

    programs: tuple[Program, ...]

    @cached_property
    def sequence(self) -> ActionSequence:
        """All actions in an order in which they can be timed. Raises DeadlockError where the
        programs wait for each other."""
        return sequence_of(self.programs, self.stage_rank)

    @cached_property
    def collectives(self) -> tuple[Program, ...]:
        """The gathers and reductions of every rank, in the order of its program."""
        return tuple(
            tuple(action for action in program if action[1] in COLLECTIVE)
            for program in self.programs
        )

    @cached_property
    def gradient_stages(self) -> tuple[tuple[tuple[int, ...], int], ...]:
        """By rank: its stages in the order in which their first gradients are made or reduced, and
        the stage whose gradients are the last."""
        ranks = []
        for program in self.programs:
            stages = [stage for stage, op, _ in program if op in COMPLETES]
            ranks.append((tuple(dict.fromkeys(stages)), stages[-1]))
        return tuple(ranks)

    def to_csv(self) -> str:
        """The CSV form that torch reads and writes: one line per rank, one action per cell."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        for program in self.programs:
            writer.writerow([str(action) for action in program])
        return out.getvalue()


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


def place_stages(style: StageStyle, num_ranks: int, chunks: int) -> tuple[int, ...]:
    """The rank of every stage, by the name of a placement."""
    return (v_placement if style == "v" else loop_placement)(num_ranks, chunks)
