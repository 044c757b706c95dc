"""What every rank issues to its device in one step, from its program: ours and torch's.

``tests/streams`` holds what is said here of our engine against what the engine issues.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from itertools import pairwise

from zeropp.emulate.log import Issued, Log, Logs, Message
from zeropp.emulate.rendezvous import hanging_waits, mismatches, stuck
from zeropp.schedule.passes import with_step_end
from zeropp.schedule.program import (
    COMPUTE,
    NEEDS_PARAMETERS,
    Action,
    Op,
    RankProgram,
    Schedule,
    StepEnd,
)

GroupOf = Callable[[int, int], Hashable]  # of a message between two pipeline ranks
COMPUTE_STREAM = "compute"
# Communication kernels that fit on a device at a time: of those that could start, any does, or the
# one that was issued first. A pipeline rank has at most six in a step: two lanes, four of messages.
ANY_FIRST, IN_ORDER = 5, 3


def channels(schedule: Schedule) -> GroupOf:
    """The engine's groups: in each a rank has one peer and one direction."""
    pairs = {
        pair
        for here, there in pairwise(schedule.stage_rank)
        if here != there
        for pair in ((here, there), (there, here))
    }
    lots: list[list[tuple[int, int]]] = []
    for pair in sorted(pairs):
        free = (lot for lot in lots if not any(set(pair) & set(other) for other in lot))
        lot = next(free, None)
        if lot is None:
            lots.append(lot := [])
        lot.append(pair)
    groups = {pair: f"pairs {number}" for number, lot in enumerate(lots) for pair in lot}
    return lambda source, target: groups[source, target]


def one_group(source: int, target: int) -> Hashable:
    """All messages of a pipeline in one group, as torch's pipelines have it."""
    del source, target
    return "pipeline"


def logs_of(
    schedule: Schedule, group_of: GroupOf | None = None, shard: int = 1
) -> dict[int, list[Issued]]:
    """What every rank issues in one step of a lowered schedule, by global rank: each of ``shard``
    pipelines has its own ranks. A step ends with an update, which begins with a sum over all ranks
    that the host reads."""
    group_of = group_of or channels(schedule)
    if not any(action.op is Op.UPDATE for action in schedule.programs[0]):
        schedule = with_step_end(schedule, StepEnd())
    ranks = schedule.num_ranks
    return {
        part * ranks + rank: _Step(schedule, rank, group_of, part, shard).log.issued
        for part in range(shard)
        for rank in range(ranks)
    }


class _Step:
    """One rank's step: each action as the engine issues it."""

    def __init__(
        self, schedule: Schedule, rank: int, group_of: GroupOf, part: int, shard: int
    ) -> None:
        self.log = log = Log()
        self._schedule, self._rank, self._group_of = schedule, rank, group_of
        self._part, self._shard = part, shard
        self._gathers: dict[int, int] = {}  # events by stage
        self._reductions: dict[int, int] = {}
        self._received: dict[tuple[Op, int, int | None], int] = {}
        self._sends: list[int] = []
        for action in schedule.programs[rank]:
            log.place(str(action))
            self._run(action)

    def _run(self, action: Action) -> None:
        log, stage = self.log, action.stage
        if action.op in COMPUTE:
            self._compute(action)
        elif action.op is Op.UNSHARD:
            self._gathers[stage] = self._collective("gathers")
        elif action.op is Op.RESHARD:
            self._wait_for_gather(stage)
        elif action.op is Op.REDUCE_GRAD:
            for event in self._reductions.values():
                log.wait(COMPUTE_STREAM, event)
            self._reductions = {stage: self._collective("reductions")}
        elif action.op is Op.UPDATE:
            for event in (*self._sends, *self._reductions.values()):
                log.wait(COMPUTE_STREAM, event)
            count = self._schedule.num_ranks * self._shard
            log.collective(COMPUTE_STREAM, "all", count, "the step's sums")
            log.sync(COMPUTE_STREAM, "the step's sums")
        else:
            self._message(action)

    def _compute(self, action: Action) -> None:
        stage, op, microbatch = action
        if op in NEEDS_PARAMETERS:
            self._wait_for_gather(stage)
            receive = Op.RECV_F if op is Op.FORWARD else Op.RECV_B
            event = self._received.pop((receive, stage, microbatch), None)
            if event is not None:
                self.log.wait(COMPUTE_STREAM, event)
        self.log.kernel(COMPUTE_STREAM)

    def _wait_for_gather(self, stage: int) -> None:
        if stage in self._gathers:
            self.log.wait(COMPUTE_STREAM, self._gathers.pop(stage))

    def _collective(self, lane: str) -> int:
        self.log.follow(lane, COMPUTE_STREAM)
        group = (lane, self._rank)
        self.log.collective(lane, group, self._shard, f"{lane} of {self._rank}")
        return self.log.record(lane)

    def _message(self, action: Action) -> None:
        stage, op, microbatch = action
        sends = op in (Op.SEND_F, Op.SEND_B)
        step = 1 if op in (Op.SEND_F, Op.RECV_B) else -1
        peer = self._schedule.stage_rank[stage + step]
        source, target = (self._rank, peer) if sends else (peer, self._rank)
        # Both ends name a message by the stages that it goes between.
        stages = sorted((stage, stage + step), reverse=op in (Op.SEND_B, Op.RECV_B))
        content = f"{stages[0]} to {stages[1]}, microbatch {microbatch}"
        group = (self._group_of(source, target), self._part)
        stream = f"nccl {group}"
        self.log.follow(stream, COMPUTE_STREAM)
        self.log.messages(stream, [Message(group, source, target, content)], str(action))
        event = self.log.record(stream)
        if sends:
            self._sends.append(event)
        else:
            self._received[op, stage, microbatch] = event


def with_early_receives(programs: tuple[RankProgram, ...], places: int) -> tuple[RankProgram, ...]:
    """The programs with every receive moved forward by this many compute actions."""
    found = []
    for program in programs:
        out = list(program)
        for index, action in enumerate(program):
            if action.op in (Op.RECV_F, Op.RECV_B):
                out.remove(action)
                left, to = places, index
                while to > 0 and left:
                    to -= 1
                    left -= out[to].op in COMPUTE
                out.insert(to, action)
        found.append(tuple(out))
    return tuple(found)


def first_uses(logs: dict[int, list[Issued]]) -> dict[int, list[Issued]]:
    """The logs in which every host waits for its device before the first action of each kind, as
    where a kernel is loaded on its first use."""
    found: dict[int, list[Issued]] = {}
    for rank, log in logs.items():
        seen: set[str] = set()
        found[rank] = []
        for one in log:
            kind = one.what.strip("0123456789")
            if one.kind == "place" and kind not in seen:
                seen.add(kind)
                found[rank].append(Issued("sync", what=f"the first {kind}"))
            found[rank].append(one)
    return found


def check(logs: Logs, waits_of: int) -> None:
    """Everything ends; a wait for the device in one of the first ``waits_of`` ranks does, too."""
    assert mismatches(logs) == []
    assert stuck(logs) == {}
    assert stuck(logs, resident=IN_ORDER) == {}
    assert stuck(logs, resident=ANY_FIRST, seed=1) == {}
    assert {rank: hanging_waits(logs, rank) for rank in range(waits_of)} == {
        rank: [] for rank in range(waits_of)
    }
