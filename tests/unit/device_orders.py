"""What every rank issues to its device in one step, from its program: ours, torch's, Megatron's.

``tests/streams`` holds what is said here of our engine against what the engine issues.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from itertools import pairwise

from zeropp.emulate.log import Issued, Log, Logs, Message
from zeropp.emulate.rendezvous import hanging_waits, mismatches, stuck
from zeropp.schedule.generators import interleaved_orders
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


def megatron_1f1b(ranks: int, microbatches: int) -> dict[int, list[Issued]]:
    """Megatron-Core's 1F1B: batches of messages on one communicator (``batch_p2p_comm``), the host
    waiting for its device after each (``batch_p2p_sync``)."""
    return {rank: _megatron_rank(rank, ranks, microbatches) for rank in range(ranks)}


def _megatron_rank(rank: int, ranks: int, microbatches: int) -> list[Issued]:
    log, stream = Log(), "nccl pipeline"
    done = {"F": 0, "B": 0, "F from": 0, "B from": 0}

    def talk(*kinds: str) -> None:
        """Send the output of the last forward or backward, or receive the input of the next."""
        messages = []
        for kind in kinds:
            forward, sends = kind.startswith("F"), not kind.endswith("from")
            peer = rank + (1 if forward == sends else -1)
            number = done[kind] - 1 if sends else done[kind]
            if not sends:
                done[kind] += 1
            if 0 <= peer < ranks:
                pair = (rank, peer) if sends else (peer, rank)
                messages.append(Message("pipeline", *pair, f"{kind[0]} {number}"))
        if messages:
            log.follow(stream, COMPUTE_STREAM)
            log.messages(stream, messages, str(kinds))
            log.wait(COMPUTE_STREAM, log.record(stream))
            log.sync(None, "batch_p2p_sync")

    def compute(kind: str) -> None:
        log.kernel(COMPUTE_STREAM)
        done[kind] += 1

    warmup = min(ranks - rank - 1, microbatches)
    left = microbatches - warmup
    for _ in range(warmup):
        talk("F from")
        compute("F")
        talk("F")
    if left:
        talk("F from")
    for number in range(left):
        compute("F")
        talk("F", "B from")
        compute("B")
        talk("B", *(("F from",) if number < left - 1 else ()))
    for _ in range(warmup):
        talk("B from")
        compute("B")
        talk("B")
    return log.issued


def megatron_interleaved(
    ranks: int, chunks: int, microbatches: int, *, lazy: bool
) -> dict[int, list[Issued]]:
    """Megatron-Core's interleaved 1F1B with ``overlap_p2p_comm``: messages one by one, each pair of
    ranks on a communicator of its own. ``lazy``: it is made at the pair's first message."""
    sizes = (ranks, chunks, microbatches)
    return {rank: _MegatronRank(rank, *sizes, lazy=lazy).log.issued for rank in range(ranks)}


class _MegatronRank:
    """The order of ``forward_backward_pipelining_with_interleaving`` (megatron-core 0.16.1)."""

    def __init__(
        self, rank: int, ranks: int, chunks: int, microbatches: int, *, lazy: bool
    ) -> None:
        self.log, self._lazy = Log(), lazy
        self._rank, self._ranks, self._chunks = rank, ranks, chunks
        self._met: set[tuple[int, int]] = set()
        self._arrived: dict[tuple[str, int], int] = {}
        order = interleaved_orders(0, ranks, chunks, num_microbatches=microbatches, group=ranks)
        self._chunk_of = {
            kind: [stage // ranks for stage, _ in steps]
            for kind, steps in zip("FB", order, strict=True)
        }
        total = chunks * microbatches
        warmup = min(total, 2 * (ranks - rank - 1) + (chunks - 1) * ranks)
        self._first("F")
        for number in range(warmup):
            self._step("F", number)
        self._first("B")
        for number in range(total - warmup):
            self._step("F", warmup + number)
            self._step("B", number)
        for number in range(total - warmup, total):
            self._step("B", number)

    def _first(self, kind: str) -> None:
        if self._rank != self._leader(kind):
            self._talk(kind, send=None, receive=0)

    def _leader(self, kind: str) -> int:
        """The rank on which microbatches, or their gradients, begin."""
        return 0 if kind == "F" else self._ranks - 1

    def _step(self, kind: str, number: int) -> None:
        event = self._arrived.get((kind, number))
        if event is not None:
            self.log.wait("compute", event)
        self.log.kernel("compute")
        chunk, last = self._chunk_of[kind][number], self._chunks - 1 if kind == "F" else 0
        ends = self._rank == self._ranks - 1 - self._leader(kind) and chunk == last
        receive: int | None = number + 1
        if self._rank == self._leader(kind):  # what the other end has sent in the same round
            receive = number - (self._ranks - 1)
            if receive < 0 or self._chunk_of[kind][receive] == last:
                receive = None
        elif number + 1 == len(self._chunk_of[kind]):
            receive = None
        self._talk(kind, send=None if ends else number, receive=receive)

    def _talk(self, kind: str, *, send: int | None, receive: int | None) -> None:
        """``_p2p_ops``: even ranks send first, odd ones receive first."""
        step = 1 if kind == "F" else -1
        target, source = (self._rank + step) % self._ranks, (self._rank - step) % self._ranks
        sending = () if send is None else ((self._rank, target, send),)
        receiving = () if receive is None else ((source, self._rank, receive),)
        for one in (*receiving, *sending) if self._rank % 2 else (*sending, *receiving):
            self._message(kind, *one)

    def _message(self, kind: str, source: int, target: int, number: int) -> None:
        pair = (min(source, target), max(source, target))
        if self._lazy and pair not in self._met:
            self._met.add(pair)
            self.log.meet(pair, 2)
        stream = f"nccl {pair}"
        self.log.follow(stream, "compute")
        message = Message(stream, source, target, f"{kind}{number}")
        self.log.messages(stream, [message], f"{kind}{number} from {source} to {target}")
        if target == self._rank:
            self._arrived[kind, number] = self.log.record(stream)


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
