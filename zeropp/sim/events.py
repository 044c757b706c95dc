"""The event loop: what a set of programs takes on given durations.

Every rank's program is in order, so the times are the longest paths through the programs and
the messages between them. A rank has lanes that run beside each other, each in order: compute,
the shard group's link (gathers and reductions, which share its bandwidth), and transfers (one
lane a direction of the pipeline). An action of another lane starts no sooner than the compute
actions before it have ended; a gather's copy is done by the first compute action that uses it, a
reduction's before it starts. With programs that hold no transfers (compute only) a message takes
its boundary's ``transfer`` from the producer's end. Inner loops work on integers: a step of 64
ranks has half a million actions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zeropp.schedule.action import Action, Op
from zeropp.schedule.program import Program, Schedule, StageCost
from zeropp.timeline import Lane, Span

_UNKNOWN = -1.0
_POSTED = -2.0  # receive posted, message not yet sent

LANES: dict[Op, Lane] = {
    Op.FORWARD: "compute",
    Op.BACKWARD_INPUT: "compute",
    Op.BACKWARD_WEIGHT: "compute",
    Op.FULL_BACKWARD: "compute",
    Op.UNSHARD: "gather",
    Op.RESHARD: "gather",
    Op.REDUCE_GRAD: "reduce",
    Op.SEND_F: "transfer",
    Op.SEND_B: "transfer",
    Op.RECV_F: "transfer",
    Op.RECV_B: "transfer",
}


class DeadlockError(ValueError):
    """The programs wait for each other. ``stuck[r]`` is the index at which rank r stopped."""

    def __init__(self, message: str, stuck: tuple[int, ...]) -> None:
        super().__init__(message)
        self.stuck = stuck


@dataclass(frozen=True)
class EventResult:
    """Outcome of one run. Times in the unit of the costs.

    ``start[r][i]`` and ``end[r][i]`` belong to action ``i`` of rank ``r``; a receive starts and
    ends when its message is there. ``exposed_gather[r]`` is the time that the
    compute lane stood still for parameters, ``exposed_wait[r]`` for messages.
    """

    programs: tuple[Program, ...]
    start: tuple[list[float], ...]
    end: tuple[list[float], ...]
    busy: tuple[float, ...]
    exposed_gather: tuple[float, ...]
    exposed_wait: tuple[float, ...]
    step_s: float

    @property
    def bubble(self) -> float:
        """Share of the step in which the busiest rank's compute lane stands still."""
        return 1.0 - max(self.busy) / self.step_s

    @property
    def over_ideal(self) -> float:
        """Step over the busiest rank's compute: 1 is a pipeline without bubbles."""
        return self.step_s / max(self.busy)

    def spans(self) -> tuple[Span, ...]:
        """Spans for a Timeline; receives and releases take no time and are left out."""
        return tuple(
            Span(rank, LANES[action.op], str(action), self.start[rank][i], self.end[rank][i])
            for rank, program in enumerate(self.programs)
            for i, action in enumerate(program)
            if self.end[rank][i] > self.start[rank][i]
        )


def run(schedule: Schedule, costs: Sequence[StageCost]) -> EventResult:
    """Price a schedule; one cost a stage. Raises DeadlockError where it cannot end."""
    return run_programs(schedule.programs, schedule.stage_rank, costs)


def run_programs(
    programs: Sequence[Program], stage_rank: Sequence[int], costs: Sequence[StageCost]
) -> EventResult:
    """As ``run``, on bare programs."""
    return _Loop(programs, stage_rank, costs).result()


class _Loop:
    def __init__(
        self, programs: Sequence[Program], stage_rank: Sequence[int], costs: Sequence[StageCost]
    ) -> None:
        self._programs = tuple(programs)
        self._stage_rank = stage_rank
        self._costs = costs
        self._lowered = any(a.op.is_transfer for program in programs for a in program)
        self._stages = len(stage_rank)
        self._microbatches = 1 + max(
            (a.microbatch or 0 for program in programs for a in program), default=0
        )
        size = self._stages * self._microbatches
        # Times at which inputs are at hand, and at which messages arrive, by stage and microbatch.
        self._ready_f = [_UNKNOWN] * size
        self._ready_b = [_UNKNOWN] * size
        self._message_f = [_UNKNOWN] * size
        self._message_b = [_UNKNOWN] * size
        self._ready_f[: self._microbatches] = [0.0] * self._microbatches
        self._done_i = [False] * size
        self._waiting: dict[tuple[int, int], int] = {}  # (table, key) -> rank
        ranks = len(self._programs)
        self._position = [0] * ranks
        self._compute = [0.0] * ranks
        self._shard_link = [0.0] * ranks
        self._link_f = [0.0] * ranks
        self._link_b = [0.0] * ranks
        self._busy = [0.0] * ranks
        self._stall_gather = [0.0] * ranks
        self._stall_wait = [0.0] * ranks
        self._unsharded = [0.0] * self._stages
        self._copy_out = [0.0] * self._stages  # still to be done before the stage's next use
        self._start: tuple[list[float], ...] = tuple([] for _ in range(ranks))
        self._end: tuple[list[float], ...] = tuple([] for _ in range(ranks))
        self._runnable = list(range(ranks - 1, -1, -1))

    def result(self) -> EventResult:
        while self._runnable:
            self._advance(self._runnable.pop())
        stuck = tuple(self._position)
        if any(stuck[r] < len(p) for r, p in enumerate(self._programs)):
            where = ", ".join(
                f"rank {r} at {p[stuck[r]]}"
                for r, p in enumerate(self._programs)
                if stuck[r] < len(p)
            )
            raise DeadlockError(f"deadlock: {where}", stuck)
        lanes = (self._compute, self._shard_link, self._link_f, self._link_b)
        return EventResult(
            programs=self._programs,
            start=self._start,
            end=self._end,
            busy=tuple(self._busy),
            exposed_gather=tuple(self._stall_gather),
            exposed_wait=tuple(self._stall_wait),
            step_s=max(max(lane, default=0.0) for lane in lanes),
        )

    def _advance(self, rank: int) -> None:
        """Run a rank until its program ends or it waits for another rank."""
        program = self._programs[rank]
        starts, ends = self._start[rank], self._end[rank]
        i = self._position[rank]
        while i < len(program):
            span = self._execute(rank, program[i])
            if span is None:
                break
            starts.append(span[0])
            ends.append(span[1])
            i += 1
        self._position[rank] = i

    def _execute(self, rank: int, action: Action) -> tuple[float, float] | None:
        """Start and end of one action; None where it waits for what is not yet known."""
        op, stage = action.op, action.stage
        if op is Op.UNSHARD:
            start = max(self._shard_link[rank], self._compute[rank])
            self._shard_link[rank] = self._unsharded[stage] = start + self._costs[stage].unshard
            self._copy_out[stage] = self._costs[stage].copy_out
            return start, self._shard_link[rank]
        if op is Op.RESHARD:
            return self._compute[rank], self._compute[rank]
        if op is Op.REDUCE_GRAD:
            self._compute[rank] += self._costs[stage].copy_in
            self._busy[rank] += self._costs[stage].copy_in
            start = max(self._shard_link[rank], self._compute[rank])
            self._shard_link[rank] = start + self._costs[stage].reduce_grad
            return start, self._shard_link[rank]
        assert action.microbatch is not None
        key = stage * self._microbatches + action.microbatch
        if op.is_compute:
            return self._execute_compute(rank, action, key)
        if op is Op.SEND_F or op is Op.SEND_B:
            return self._execute_send(rank, op, stage, key)
        return self._execute_receive(rank, op, key)

    def _execute_compute(self, rank: int, action: Action, key: int) -> tuple[float, float] | None:
        op, stage = action.op, action.stage
        cost = self._costs[stage]
        before = self._compute[rank]
        if op is Op.BACKWARD_WEIGHT:
            if not self._done_i[key]:
                self._waiting[4, key] = rank
                return None
            ready, duration = before, cost.backward_weight
        elif op is Op.FORWARD:
            ready, duration = self._ready_f[key], cost.forward
            if ready < 0.0:
                self._waiting[0, key] = rank
                return None
        else:
            ready = self._ready_b[key]
            if ready < 0.0:
                self._waiting[1, key] = rank
                return None
            duration = cost.backward_input
            if op is Op.FULL_BACKWARD:
                duration += cost.backward_weight
        start = max(before, ready)
        self._stall_wait[rank] += start - before
        if op is not Op.BACKWARD_WEIGHT and self._unsharded[stage] > start:
            self._stall_gather[rank] += self._unsharded[stage] - start
            start = self._unsharded[stage]
        if op is not Op.BACKWARD_WEIGHT:  # which needs no parameters
            duration += self._copy_out[stage]
            self._copy_out[stage] = 0.0
        end = start + duration
        self._compute[rank] = end
        self._busy[rank] += duration
        self._produce(op, stage, key, end)
        return start, end

    def _produce(self, op: Op, stage: int, key: int, end: float) -> None:
        if op is Op.FORWARD:
            if stage == self._stages - 1:
                self._set(self._ready_b, 1, key, end)
            else:
                self._pass_on(self._ready_f, 0, stage, stage + 1, key + self._microbatches, end)
        elif op is not Op.BACKWARD_WEIGHT:
            self._done_i[key] = True
            if stage > 0:
                self._pass_on(self._ready_b, 1, stage, stage - 1, key - self._microbatches, end)

    def _pass_on(
        self, table: list[float], name: int, source: int, target: int, key: int, end: float
    ) -> None:
        if self._stage_rank[source] == self._stage_rank[target]:
            self._set(table, name, key, end)
        elif not self._lowered:
            self._set(table, name, key, end + self._costs[min(source, target)].transfer)

    def _execute_send(self, rank: int, op: Op, stage: int, key: int) -> tuple[float, float]:
        forward = op is Op.SEND_F
        link = self._link_f if forward else self._link_b
        start = max(link[rank], self._compute[rank])
        end = link[rank] = start + self._costs[stage if forward else stage - 1].transfer
        if forward:
            self._set(self._message_f, 2, key + self._microbatches, end)
        else:
            self._set(self._message_b, 3, key - self._microbatches, end)
        return start, end

    def _execute_receive(self, rank: int, op: Op, key: int) -> tuple[float, float]:
        """Post a receive: it never blocks, the compute action that needs it does."""
        forward = op is Op.RECV_F
        message = (self._message_f if forward else self._message_b)[key]
        ready = self._ready_f if forward else self._ready_b
        if message < 0.0:
            ready[key] = _POSTED
            return self._compute[rank], self._compute[rank]
        ready[key] = message
        return message, message

    def _set(self, table: list[float], name: int, key: int, time: float) -> None:
        """Write a time and wake the rank that waits for it."""
        table[key] = time
        if name >= 2:  # a message: hand it over if its receive is posted
            ready = self._ready_f if name == 2 else self._ready_b
            if ready[key] != _POSTED:
                return
            ready[key] = time
            name -= 2
        rank = self._waiting.pop((name, key), None)
        if rank is not None:
            self._runnable.append(rank)
