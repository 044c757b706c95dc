"""The event loop: how long a set of programs takes, given the durations of their actions.

A rank has seven lanes that work side by side, each in the order of the program: compute; the link
of its shard group (gathers and reductions, which share its bandwidth); that of its replicas; one
lane for transfers in each direction of the pipeline, or for each other rank, where transfers begin
once both ranks have come to them (``Schedule.pair_streams``); and one for copies to the host's
memory and one for those back. A gather, reduction, transfer or copy starts once the compute actions
before it in the program have ended, a reduction over the replicas once the stage's gradients are
reduced over the shards, and a load once its store has ended. Compute waits for a store where the
device's memory is freed, and for a load at the backward that uses it. Tied sums, updates and the
gathers of what is updated whole stand in line with compute, and wait for all reductions of their
own rank, and for no other rank. The copy that belongs to a gather is done before the first compute
action that uses the parameters, while that waits for its input; the copy that belongs to a
reduction is done before it starts. In programs without transfers (compute actions alone) a message
takes ``StageCost.transfer`` from the end of the action that produces it.

Where gradients are reduced in parts, the last weight gradient before a reduction completes one
after the other, evenly spread. Each is reduced from then on, and the next backward comes to a part
once the memory of that of the last reduction is free.

The loop goes once through all actions in the order of ``zeropp.schedule.program``, in which the
inputs of every action come before it. It works on plain numbers and calls few functions, because a
step of 64 ranks has a million actions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from typing import NamedTuple

from zeropp.schedule.program import (
    OFFLOAD,
    STEP_END,
    Action,
    ActionSequence,
    Op,
    RankProgram,
    Schedule,
    StageCost,
    collector_paused,
)
from zeropp.types.timeline import Lane, Span

LANES: dict[Op, Lane] = {
    Op.FORWARD: "compute",
    Op.BACKWARD_INPUT: "compute",
    Op.BACKWARD_WEIGHT: "compute",
    Op.FULL_BACKWARD: "compute",
    Op.UNSHARD: "gather",
    Op.RESHARD: "gather",
    Op.REDUCE_GRAD: "reduce",
    Op.REDUCE_REPLICAS: "replicas",
    Op.REDUCE_TIED: "compute",
    Op.GATHER_WHOLE: "compute",
    Op.UPDATE: "compute",
    Op.GATHER_UPDATED: "gather",
    Op.SEND_F: "transfer",
    Op.SEND_B: "transfer",
    Op.RECV_F: "transfer",
    Op.RECV_B: "transfer",
    Op.STORE: "offload",
    Op.FREE: "offload",
    Op.LOAD: "offload",
}


@dataclass(frozen=True, kw_only=True)
class EventResult:
    """Outcome of one run. All times are in the unit of the costs.

    ``starts[i]`` and ``ends[i]`` belong to action ``i`` of ``sequence``, which has the actions of
    all ranks; releases and one half of each message (its receive, or with ``pair_streams`` its
    send) take no time. ``busy[r]`` is the sum of rank r's compute, its update aside.
    ``exposed_gather[r]`` is the time during which its compute waited for parameters,
    ``exposed_wait[r]`` for messages. ``updated[r]`` is when rank r has updated its parameters and,
    with ZeRO-1, gathered them.
    """

    programs: tuple[RankProgram, ...]
    stage_rank: tuple[int, ...]
    sequence: tuple[Action, ...]
    starts: list[float]
    ends: list[float]
    busy: tuple[float, ...]
    exposed_gather: tuple[float, ...]
    exposed_wait: tuple[float, ...]
    updated: tuple[float, ...]
    step_s: float

    @cached_property
    def start(self) -> tuple[list[float], ...]:
        """When action ``i`` of the program of rank ``r`` starts: ``start[r][i]``."""
        return self._by_rank(self.starts)

    @cached_property
    def end(self) -> tuple[list[float], ...]:
        """When action ``i`` of the program of rank ``r`` ends: ``end[r][i]``."""
        return self._by_rank(self.ends)

    def _by_rank(self, times: list[float]) -> tuple[list[float], ...]:
        ranks: tuple[list[float], ...] = tuple([] for _ in self.programs)
        for (stage, _, _), time in zip(self.sequence, times, strict=True):
            ranks[self.stage_rank[stage]].append(time)
        return ranks

    @property
    def bubble(self) -> float:
        """The share of the step in which the rank with the most compute does not compute."""
        return 1.0 - max(self.busy) / self.step_s

    @property
    def over_ideal(self) -> float:
        """The step time divided by the compute of the rank with the most; 1 means no bubble."""
        return self.step_s / max(self.busy)

    @collector_paused()
    def spans(self) -> tuple[Span, ...]:
        """Spans for a Timeline, rank by rank. What takes no time is left out."""
        ranks: list[list[Span]] = [[] for _ in self.programs]
        add = [spans.append for spans in ranks]
        where, texts = self.stage_rank, [f"{stage}" for stage in range(len(self.stage_rank))]
        for (stage, op, j), start, end in zip(self.sequence, self.starts, self.ends, strict=True):
            if end > start:
                rank, lane = where[stage], LANES[op]
                action = texts[stage] + op.value + ("" if j is None else f"{j}")
                add[rank](Span(rank, lane, action, start, end))
        return tuple(chain.from_iterable(ranks))


_UNKNOWN = -1.0
_NO_LANE: list[float] = []
_PARTS = 16  # how often a run that may give up looks whether it should
_ROUNDING = 1e-9  # sums of durations are exact to this share at least
# Kinds of actions; the first is a use whose tensors may have to come from the host.
_LOADED, _USE, _WEIGHT, _SEND, _MEET, _RECEIVE, _OTHER, _END, _HOST = range(9)


class _How(NamedTuple):
    """How to time all actions of one operation. Lists have one entry per stage."""

    kind: int
    seconds: Sequence[float] = ()
    place: int = 0  # of its input (for a send, its output), before the microbatch's number is added
    # From the place of its input to that of its output; of a message, from its stage to the other.
    moves: Sequence[int] = ()
    after: Sequence[float] = ()  # seconds from its end to the arrival of its output
    lane: list[float] = _NO_LANE  # until when a send's lane is busy, per rank or pair of ranks


def run(schedule: Schedule, costs: Sequence[StageCost]) -> EventResult:
    """Price a schedule, with one cost per stage. Raises DeadlockError where it cannot finish."""
    return _Loop(schedule.programs, schedule.stage_rank, schedule.sequence, costs).result()


def run_within(
    schedule: Schedule, costs: Sequence[StageCost], limit_s: float
) -> EventResult | None:
    """Like ``run``, but gives up as soon as the programs certainly take ``limit_s`` or longer, and
    then returns None."""
    loop = _Loop(schedule.programs, schedule.stage_rank, schedule.sequence, costs)
    return loop.result() if loop.ends_within(limit_s) else None


class _Loop:
    """State of a run. Inputs have places ``stage * microbatches + microbatch`` in a table: those of
    forwards come first, then a spare row, then those of backwards, then rows that nothing reads."""

    def __init__(
        self,
        programs: tuple[RankProgram, ...],
        stage_rank: Sequence[int],
        sequence: ActionSequence,
        costs: Sequence[StageCost],
    ) -> None:
        self._programs, self._stage_rank = programs, stage_rank
        self._sequence, self._costs = sequence, costs
        ranks, stages = len(programs), len(stage_rank)
        self._m = sequence.num_microbatches
        self._back = (stages + 1) * self._m
        self._ready = [_UNKNOWN] * (3 * self._back)
        self._ready[: self._m] = [0.0] * self._m
        self._compute = [0.0] * ranks
        self._shard_link, self._replica_link = [0.0] * ranks, [0.0] * ranks
        self._link_f, self._link_b = [0.0] * ranks, [0.0] * ranks
        self._host_out, self._host_in = [0.0] * ranks, [0.0] * ranks
        self._stored: dict[int, float] = {}  # when a copy ends, by the place of its backward
        self._loaded: dict[int, float] = {}
        self._busy = [0.0] * ranks
        self._stall_gather, self._stall_wait = [0.0] * ranks, [0.0] * ranks
        self._unsharded = [0.0] * stages
        self._reduced = [0.0] * stages  # over the shards
        self._copy_out = [0.0] * stages  # still to be done before the stage's next use
        self._start: list[float] = []
        self._end: list[float] = []
        self._waiting: dict[int, list[float]] = {}  # when the parts of a rank's reduction end
        in_parts = any(cost.parts > 1 for cost in costs)
        full = in_parts and any(action.op is Op.FULL_BACKWARD for action in programs[0])
        # Seconds of a backward, or weight gradient, from its first weight gradient to its end.
        self._window = [c.backward_weight + (c.backward_input - c.again) * full for c in costs]
        self._table = self._how_to_time()

    def ends_within(self, limit_s: float) -> bool:
        """Run part by part, and return False once a rank cannot end in less than ``limit_s``, even
        if it does not wait any more."""
        limit_s *= 1.0 + _ROUNDING
        left = [0.0] * len(self._programs)  # seconds of compute actions, copies aside
        for rank, cost in zip(self._stage_rank, self._costs, strict=True):
            left[rank] += self._m * cost.compute
        for _ in range(_PARTS):
            self._run(-(-len(self._sequence.actions) // _PARTS))
            if any(
                now + work - busy > limit_s
                for now, work, busy in zip(self._compute, left, self._busy, strict=True)
            ):
                return False
        return True

    def result(self) -> EventResult:
        """Run what has not been run, and sum up."""
        self._run(len(self._sequence.actions))
        updated = tuple(map(max, self._compute, self._replica_link))
        lanes = (updated, self._shard_link, self._link_f, self._link_b, self._host_in)
        return EventResult(
            programs=self._programs,
            stage_rank=tuple(self._stage_rank),
            sequence=self._sequence.actions,
            starts=self._start,
            ends=self._end,
            busy=tuple(self._busy),
            exposed_gather=tuple(self._stall_gather),
            exposed_wait=tuple(self._stall_wait),
            updated=updated,
            step_s=max(max(lane, default=0.0) for lane in lanes),
        )

    def _run(self, count: int) -> None:
        """Time the next ``count`` actions. All that is done once per action is in this loop."""
        ready, busy, m, table = self._ready, self._busy, self._m, self._table
        compute, ranks = self._compute, self._stage_rank
        unsharded, copy_out, waiting = self._unsharded, self._copy_out, self._waiting
        add_start, add_end = self._start.append, self._end.append
        begin = len(self._start)
        for stage, op, microbatch in self._sequence.actions[begin : begin + count]:
            kind, seconds, place, moves, after, lane = table[op]
            rank = ranks[stage]
            start = compute[rank]
            if kind <= _USE:
                place += stage * m + (microbatch or 0)
                if kind == _LOADED:
                    start = max(start, self._loaded.pop(place, start))
                if copy_out[stage]:  # parameters are copied once they are gathered
                    begin_copy, copied = max(start, unsharded[stage]), copy_out[stage]
                    self._stall_gather[rank] += begin_copy - start
                    busy[rank] += copied
                    copy_out[stage] = 0.0
                    start = begin_copy + copied
                if ready[place] > start:
                    self._stall_wait[rank] += ready[place] - start
                    start = ready[place]
                if unsharded[stage] > start:
                    self._stall_gather[rank] += unsharded[stage] - start
                    start = unsharded[stage]
                end = start + seconds[stage]
                if waiting and op is Op.FULL_BACKWARD:
                    end = max(end, self._with_room(stage, rank))
                compute[rank] = end
                busy[rank] += seconds[stage]
                ready[place + moves[stage]] = end + after[stage]
            elif kind == _WEIGHT:
                end = start + seconds[stage]
                if waiting:
                    end = max(end, self._with_room(stage, rank))
                compute[rank] = end
                busy[rank] += seconds[stage]
            elif kind == _SEND:
                start = max(start, lane[rank])
                end = lane[rank] = start + seconds[stage]
                ready[place + stage * m + (microbatch or 0)] = end
            elif kind == _MEET:  # so far the input is only sent
                place += stage * m + (microbatch or 0)
                peer = ranks[stage + moves[0]]
                pair = min(rank, peer) * len(compute) + max(rank, peer)
                start = max(start, ready[place], lane[pair])
                end = lane[pair] = ready[place] = start + seconds[stage]
            elif kind == _RECEIVE:  # if its message is not sent yet, it is only posted
                arrived = ready[place + stage * m + (microbatch or 0)]
                start = end = start if arrived < 0.0 else arrived
            elif kind == _OTHER:
                start, end = self._collective(stage, op, rank)
            elif kind == _HOST:
                key = self._back + stage * m + (microbatch or 0)
                start, end = self._copied(stage, op, rank, key)
            else:
                start, end = self._end_of_step(stage, op, rank)
            add_start(start)
            add_end(end)

    def _collective(self, stage: int, op: Op, rank: int) -> tuple[float, float]:
        """The times of a gather, a reduction or a release."""
        cost, link = self._costs[stage], self._shard_link
        if op is Op.RESHARD:
            return self._compute[rank], self._compute[rank]
        if op is Op.UNSHARD:
            start = max(link[rank], self._compute[rank])
            end = link[rank] = self._unsharded[stage] = start + cost.unshard
            self._copy_out[stage] = cost.copy_out
            return start, end
        self._compute[rank] += cost.copy_in
        self._busy[rank] += cost.copy_in
        parts, part_s = cost.parts, self._window[stage] / cost.parts
        complete = (self._compute[rank] - part_s * later for later in reversed(range(parts)))
        start = max(link[rank], self._compute[rank] - part_s * (parts - 1))
        ends = []
        for made in complete:
            link[rank] = max(link[rank], made) + cost.reduce_grad / parts
            ends.append(link[rank])
        end = self._reduced[stage] = link[rank]
        if parts > 1:
            self._waiting[rank] = ends
        if cost.waits_for_reduction:
            self._compute[rank] = end
        return start, end

    def _with_room(self, stage: int, rank: int) -> float:
        """When a backward, or weight gradient, ends at the earliest, as each part waits for the
        memory of one that is reduced."""
        ends = self._waiting.pop(rank, [0.0])
        left = self._window[stage] / len(ends)
        return max(end + left * (len(ends) - part) for part, end in enumerate(ends))

    def _copied(self, stage: int, op: Op, rank: int, place: int) -> tuple[float, float]:
        """The times of a copy to the host's memory or back, or of a release behind one."""
        cost, compute = self._costs[stage], self._compute
        if op is Op.STORE:
            start = max(self._host_out[rank], compute[rank])
            end = self._host_out[rank] = self._stored[place] = start + cost.store
        elif op is Op.LOAD:
            start = max(self._host_in[rank], compute[rank], self._stored[place])
            end = self._host_in[rank] = self._loaded[place] = start + cost.load
        else:
            start = end = compute[rank] = max(compute[rank], self._stored[place])
        return start, end

    def _end_of_step(self, stage: int, op: Op, rank: int) -> tuple[float, float]:
        """The times of an action that follows the passes of a stage, or of all of them."""
        cost, link, compute = self._costs[stage], self._replica_link, self._compute
        start = max(link[rank], compute[rank])
        if op is Op.REDUCE_REPLICAS:
            start = max(start, self._reduced[stage])
            end = link[rank] = start + cost.reduce_replicas
            if cost.waits_for_reduction:
                compute[rank] = end
        elif op is Op.GATHER_UPDATED:
            end = link[rank] = start + cost.gather_updated
        else:
            start = max(start, self._shard_link[rank])
            seconds = {Op.REDUCE_TIED: cost.reduce_tied, Op.GATHER_WHOLE: cost.gather_whole}
            end = compute[rank] = start + seconds.get(op, cost.update)
        return start, end

    def _how_to_time(self) -> dict[Op, _How]:
        """How to time each operation."""
        costs, m, back = self._costs, self._m, self._back
        unread = 2 * back
        weight = [cost.backward_weight for cost in costs]
        input_ = [cost.backward_input for cost in costs]
        full = [i + w for i, w in zip(input_, weight, strict=True)]
        # Seconds from each stage's output to its arrival at the next stage, in either direction;
        # None where the programs have transfers of their own for it.
        remote = [None if self._sequence.has_transfers else cost.transfer for cost in costs]
        hops = [
            0.0 if rank == following else hop
            for hop, (rank, following) in zip(remote, pairwise(self._stage_rank), strict=False)
        ]
        down = [*(unread if hop is None else m for hop in hops), back]
        up = [-m, *(unread - back if hop is None else -m for hop in hops)]
        later = [hop or 0.0 for hop in hops]
        backward = (back, up, [0.0, *later])
        use = _LOADED if self._sequence.has_loads else _USE
        kinds = dict.fromkeys(STEP_END, _END) | dict.fromkeys(OFFLOAD, _HOST)
        return {
            **{op: _How(kinds.get(op, _OTHER)) for op in Op},
            **self._how_to_time_messages(),
            Op.FORWARD: _How(_USE, [c.forward for c in costs], 0, down, [*later, 0.0]),
            Op.BACKWARD_INPUT: _How(use, input_, *backward),
            Op.FULL_BACKWARD: _How(use, full, *backward),
            Op.BACKWARD_WEIGHT: _How(_WEIGHT, weight),
        }

    def _how_to_time_messages(self) -> dict[Op, _How]:
        costs, m, back = self._costs, self._m, self._back
        after = [cost.transfer for cost in costs]
        before, nothing = [0.0, *after], [0.0] * len(costs)
        receives = {Op.RECV_F: _How(_RECEIVE, place=0), Op.RECV_B: _How(_RECEIVE, place=back)}
        if self._sequence.pair_streams:  # the time of a message is that of its receive
            lane = [0.0] * len(self._programs) ** 2
            receives[Op.RECV_F] = _How(_MEET, before, 0, [-1], lane=lane)
            receives[Op.RECV_B] = _How(_MEET, after, back, [1], lane=lane)
            after = before = nothing
        return receives | {
            Op.SEND_F: _How(_SEND, after, m, lane=self._link_f),
            Op.SEND_B: _How(_SEND, before, back - m, lane=self._link_b),
        }
