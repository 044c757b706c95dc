"""The event loop: how long a set of programs takes, given the durations of their actions.

A rank has four lanes that work side by side, each in the order of the program: compute; the link of
its shard group (gathers and reductions, which share its bandwidth); and one lane for transfers in
each direction of the pipeline. A gather, reduction or transfer starts once the compute actions
before it in the program have ended. The copy that belongs to a gather is done by the first compute
action that uses the parameters; the copy that belongs to a reduction is done before it starts. In
programs without transfers (compute actions alone) a message takes ``StageCost.transfer`` from the
end of the action that produces it. Inner loops work on plain numbers, because a step of 64 ranks
has a million actions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from zeropp.schedule.action import TRANSFER, Op
from zeropp.schedule.event_result import DeadlockError, EventResult
from zeropp.schedule.program import Program, Schedule, StageCost

_UNKNOWN = -1.0
_POSTED = -2.0  # receive posted, message not yet sent

_Times = tuple[float, float]
_Handler = Callable[[int, int, int], _Times | None]


def run(schedule: Schedule, costs: Sequence[StageCost]) -> EventResult:
    """Price a schedule, with one cost per stage. Raises DeadlockError where it cannot finish."""
    return run_programs(schedule.programs, schedule.stage_rank, costs)


def run_programs(
    programs: Sequence[Program], stage_rank: Sequence[int], costs: Sequence[StageCost]
) -> EventResult:
    """Like ``run``, for programs that are not part of a Schedule."""
    return _Loop(programs, stage_rank, costs).result()


class _Loop:
    """State of a run. Tables of times are indexed by ``stage * microbatches + microbatch``."""

    def __init__(
        self, programs: Sequence[Program], stage_rank: Sequence[int], costs: Sequence[StageCost]
    ) -> None:
        self._programs, self._costs = tuple(programs), costs
        ranks, stages = len(self._programs), len(stage_rank)
        numbers = (action.microbatch or 0 for program in programs for action in program)
        self._microbatches = 1 + max(numbers, default=0)
        self._last = stages - 1
        size = stages * self._microbatches
        # When inputs are at hand, and when messages came whose receive is not posted yet.
        self._ready_f, self._ready_b = [_UNKNOWN] * size, [_UNKNOWN] * size
        self._ready_f[: self._microbatches] = [0.0] * self._microbatches
        self._message_f, self._message_b = [_UNKNOWN] * size, [_UNKNOWN] * size
        self._waiting_f: dict[int, int] = {}  # input -> rank that waits for it
        self._waiting_b: dict[int, int] = {}
        self._done_i = [False] * size
        self._hop = _hops(self._programs, stage_rank, costs)
        self._position = [0] * ranks
        self._compute, self._shard_link = [0.0] * ranks, [0.0] * ranks
        self._link_f, self._link_b = [0.0] * ranks, [0.0] * ranks
        self._busy = [0.0] * ranks
        self._stall_gather, self._stall_wait = [0.0] * ranks, [0.0] * ranks
        self._unsharded = [0.0] * stages
        self._copy_out = [0.0] * stages  # still to be done before the stage's next use
        self._start: tuple[list[float], ...] = tuple([] for _ in range(ranks))
        self._end: tuple[list[float], ...] = tuple([] for _ in range(ranks))
        self._runnable = list(range(ranks - 1, -1, -1))

    def result(self) -> EventResult:
        handlers = self._handlers()
        while self._runnable:
            self._advance(self._runnable.pop(), handlers)
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

    def _handlers(self) -> dict[Op, _Handler]:
        """One method per kind of action. It takes rank, stage and table index and returns start and
        end, or None where the action waits for something that is not known yet."""
        return {
            Op.FORWARD: self._forward,
            Op.BACKWARD_INPUT: self._backward_input,
            Op.BACKWARD_WEIGHT: self._backward_weight,
            Op.FULL_BACKWARD: self._full_backward,
            Op.UNSHARD: self._unshard,
            Op.RESHARD: self._reshard,
            Op.REDUCE_GRAD: self._reduce,
            Op.SEND_F: self._send_f,
            Op.SEND_B: self._send_b,
            Op.RECV_F: self._receive_f,
            Op.RECV_B: self._receive_b,
        }

    def _advance(self, rank: int, handlers: dict[Op, _Handler]) -> None:
        """Run one rank until its program ends or it has to wait for another rank."""
        program, microbatches = self._programs[rank], self._microbatches
        starts, ends = self._start[rank], self._end[rank]
        for i in range(self._position[rank], len(program)):
            stage, op, microbatch = program[i]
            span = handlers[op](rank, stage, stage * microbatches + (microbatch or 0))
            if span is None:
                break
            starts.append(span[0])
            ends.append(span[1])
        self._position[rank] = len(starts)

    def _forward(self, rank: int, stage: int, key: int) -> _Times | None:
        ready = self._ready_f[key]
        if ready < 0.0:
            self._waiting_f[key] = rank
            return None
        times = self._use(rank, stage, ready, self._costs[stage].forward)
        if stage == self._last:
            self._arrive(self._ready_b, self._waiting_b, key, times[1])
        else:
            hop = self._hop[stage]
            if hop is not None:
                key += self._microbatches
                self._arrive(self._ready_f, self._waiting_f, key, times[1] + hop)
        return times

    def _backward_input(self, rank: int, stage: int, key: int) -> _Times | None:
        return self._backward(rank, stage, key, self._costs[stage].backward_input)

    def _full_backward(self, rank: int, stage: int, key: int) -> _Times | None:
        cost = self._costs[stage]
        return self._backward(rank, stage, key, cost.backward_input + cost.backward_weight)

    def _backward(self, rank: int, stage: int, key: int, duration: float) -> _Times | None:
        ready = self._ready_b[key]
        if ready < 0.0:
            self._waiting_b[key] = rank
            return None
        times = self._use(rank, stage, ready, duration)
        self._done_i[key] = True
        if stage > 0:
            hop = self._hop[stage - 1]
            if hop is not None:
                key -= self._microbatches
                self._arrive(self._ready_b, self._waiting_b, key, times[1] + hop)
        return times

    def _backward_weight(self, rank: int, stage: int, key: int) -> _Times | None:
        if not self._done_i[key]:
            return None  # a deadlock: its input gradient stands later in the same program
        start = self._compute[rank]
        duration = self._costs[stage].backward_weight
        end = self._compute[rank] = start + duration
        self._busy[rank] += duration
        return start, end

    def _use(self, rank: int, stage: int, ready: float, duration: float) -> _Times:
        """Times of a compute action that needs its input and the gathered parameters."""
        start = self._compute[rank]
        if ready > start:
            self._stall_wait[rank] += ready - start
            start = ready
        if self._unsharded[stage] > start:
            self._stall_gather[rank] += self._unsharded[stage] - start
            start = self._unsharded[stage]
        duration += self._copy_out[stage]
        self._copy_out[stage] = 0.0
        end = self._compute[rank] = start + duration
        self._busy[rank] += duration
        return start, end

    def _arrive(self, ready: list[float], waiting: dict[int, int], key: int, time: float) -> None:
        """Note when an input arrives, and wake the rank that waits for it."""
        ready[key] = time
        rank = waiting.pop(key, None)
        if rank is not None:
            self._runnable.append(rank)

    def _unshard(self, rank: int, stage: int, _: int) -> _Times:
        start = max(self._shard_link[rank], self._compute[rank])
        end = start + self._costs[stage].unshard
        self._shard_link[rank] = self._unsharded[stage] = end
        self._copy_out[stage] = self._costs[stage].copy_out
        return start, end

    def _reshard(self, rank: int, _stage: int, _: int) -> _Times:
        return self._compute[rank], self._compute[rank]

    def _reduce(self, rank: int, stage: int, _: int) -> _Times:
        self._compute[rank] += self._costs[stage].copy_in
        self._busy[rank] += self._costs[stage].copy_in
        start = max(self._shard_link[rank], self._compute[rank])
        end = self._shard_link[rank] = start + self._costs[stage].reduce_grad
        return start, end

    def _send_f(self, rank: int, stage: int, key: int) -> _Times:
        start = max(self._link_f[rank], self._compute[rank])
        end = self._link_f[rank] = start + self._costs[stage].transfer
        key += self._microbatches
        self._deliver(self._ready_f, self._waiting_f, self._message_f, key, end)
        return start, end

    def _send_b(self, rank: int, stage: int, key: int) -> _Times:
        start = max(self._link_b[rank], self._compute[rank])
        end = self._link_b[rank] = start + self._costs[stage - 1].transfer
        key -= self._microbatches
        self._deliver(self._ready_b, self._waiting_b, self._message_b, key, end)
        return start, end

    def _deliver(
        self,
        ready: list[float],
        waiting: dict[int, int],
        messages: list[float],
        key: int,
        time: float,
    ) -> None:
        """A message arrives: it is an input if its receive is posted, otherwise it is kept."""
        if ready[key] == _POSTED:
            self._arrive(ready, waiting, key, time)
        else:
            messages[key] = time

    def _receive_f(self, rank: int, _: int, key: int) -> _Times:
        return self._post(rank, self._ready_f, self._message_f[key], key)

    def _receive_b(self, rank: int, _: int, key: int) -> _Times:
        return self._post(rank, self._ready_b, self._message_b[key], key)

    def _post(self, rank: int, ready: list[float], message: float, key: int) -> _Times:
        """Post a receive. It never blocks; the compute action that needs the message does."""
        if message < 0.0:
            ready[key] = _POSTED
            return self._compute[rank], self._compute[rank]
        ready[key] = message
        return message, message


def _hops(
    programs: Sequence[Program], stage_rank: Sequence[int], costs: Sequence[StageCost]
) -> list[float | None]:
    """Time from each stage's output to its arrival at the next stage, in either direction; None
    where the programs have transfers of their own for it."""
    lowered = any(action.op in TRANSFER for program in programs for action in program)
    remote = [None if lowered else cost.transfer for cost in costs]
    pairs = zip(remote, stage_rank, stage_rank[1:], strict=False)
    return [0.0 if rank == following else hop for hop, rank, following in pairs]
