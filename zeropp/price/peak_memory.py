"""The bytes that a pipeline rank holds while its program runs.

They follow from the plan's programs and from the bytes of its stages (``zeropp.price.plan_price``).
An action allocates when it is issued and frees when it has ended, so the peak depends only on the
order of actions; durations say when the bytes are held.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import NamedTuple

from zeropp.price.plan_price import StageMemory, StepBytes
from zeropp.schedule.plan import MemoryBytes, Plan, SizedPlan
from zeropp.schedule.program import NEEDS_PARAMETERS, Op
from zeropp.types.frozen import replace

Moment = tuple[int, int, int]  # gradients, activations, workspace


class RankMemory:
    """The bytes of one rank while its program is run through.

    The handler of an action updates them to what the action leaves, and returns its fullest moment
    if that is different. ``copy`` is what the last reduction still holds. A weight gradient frees
    activations while it runs, so only its beginning and end matter.
    """

    def __init__(self, plan: Plan, price: StepBytes, rank: int) -> None:
        schedule = plan.schedule
        self.gradients = self.activations = self.copy = 0
        self.host = self.most_host = 0  # of the host's memory, now and at most so far
        # Parameters that the first and the last stage share are always gathered.
        self.unsharded = price.memory[0].unsharded if price.shared_ends else 0
        self._copied = -1  # the flat chunk to whose last reduction ``copy`` belongs
        self._copies: dict[bool, int] = {}  # of it, by whether gradients are early
        self._one_buffer = plan.gradient_parts > 1  # of weight gradients, for all chunks
        self._runtime = price.torch_runtime
        self._memory, self._resident = price.memory, price.resident_gradients
        self._ahead, self._flat = price.gathers_ahead, price.flat_chunks
        self._due: set[int] = set()  # stages whose parameters take memory at their next use
        self._made: set[int] = set()  # stages with weight gradients that are not summed yet
        self._summed: set[tuple[int, bool]] = set()  # unreduced gradients: (stage, is it early)
        self._reduced: set[int] = set()  # stages that hold gradients for the optimizer
        self._loaded = set[tuple[int, int | None]]()  # to be freed on the host
        ranks, self._last = schedule.stage_rank, schedule.num_stages - 1
        self._shared = {0, self._last} if price.shared_ends else set()
        self._local = {s for s in range(self._last) if ranks[s] == ranks[s + 1] == rank}
        stages = schedule.stages_of(rank)
        if not any(action.op is Op.UNSHARD for action in schedule.programs[rank]):
            self._due = set(stages)  # copies, if any, are made at the first use and stay
        self._keeps_sent = price.keeps_sent
        if price.torch_runtime:
            buffers = sum((s > 0) + (s < self._last) for s in stages) * plan.num_microbatches
            self.activations = buffers * price.memory[stages[0]].boundary
        self.handlers: dict[Op, Callable[[int], Moment | None]] = {
            Op.UNSHARD: self._unshard,
            Op.RESHARD: self._reshard,
            Op.RECV_F: self._receive,
            Op.RECV_B: self._receive,
            Op.FORWARD: self._forward,
            Op.BACKWARD_INPUT: self._backward_input,
            Op.BACKWARD_WEIGHT: self._backward_weight,
            Op.FULL_BACKWARD: self._full_backward,
            Op.STORE: self._store,
            Op.FREE: lambda stage: self._move(-price.memory[stage].sent),
            Op.LOAD: lambda stage: self._move(price.memory[stage].sent),
            Op.REDUCE_GRAD: self._reduce,
            Op.REDUCE_REPLICAS: self._reduce_replicas,
            Op.GATHER_WHOLE: lambda _: self._moment(
                0, self.activations, sum(price.memory[stage].whole for stage in stages)
            ),
        }

    def begin(self, stage: int, op: Op, microbatch: int | None) -> None:
        """Note what an action does to the host's memory before it runs."""
        if op is Op.LOAD:
            self._loaded.add((stage, microbatch))
        elif self._loaded and op in _BACKWARDS and (stage, microbatch) in self._loaded:
            self._loaded.remove((stage, microbatch))
            self.host -= self._memory[stage].sent

    def left(self, index: int, op: Op) -> MemoryChange:
        """What the action at this place leaves."""
        now = self.unsharded, self.gradients, self.activations, self.copy
        return MemoryChange(index, op in GROWING, *now)

    def _unshard(self, stage: int) -> None:
        self._due.add(stage)
        if self._ahead:
            self._use(stage)

    def _use(self, stage: int) -> None:
        if stage in self._due:
            self._due.remove(stage)
            if stage not in self._shared:
                self.unsharded += self._memory[stage].unsharded

    def _reshard(self, stage: int) -> None:
        self._use(stage)
        if stage not in self._shared:
            self.unsharded -= self._memory[stage].unsharded

    def _receive(self, stage: int) -> None:
        if not self._runtime:
            self.activations += self._memory[stage].boundary

    def _store(self, stage: int) -> None:
        self.host += self._memory[stage].sent
        self.most_host = max(self.most_host, self.host)

    def _move(self, size: int) -> None:
        self.activations += size

    def _forward(self, stage: int) -> Moment | None:
        if stage in self._due:
            self._use(stage)
        memory = self._memory[stage]
        activations = self.activations + memory.activations - (memory.boundary if stage else 0)
        self.activations = activations
        if stage in self._local:  # torch's runtime drops the next stage's buffer for this output
            self.activations += -memory.boundary if self._runtime else memory.boundary
        return self.gradients, activations, memory.forward - memory.activations + self.copy

    def _backward_input(self, stage: int) -> Moment | None:
        if self._runtime and stage == 0:
            return None  # tokens have no gradient, so torch runs the backward with the weights
        memory = self._memory[stage]
        held = max(memory.activations, memory.deferred)
        fresh = int(memory.fresh_gradients * self._share(memory)) if memory.fresh_gradients else 0
        others = self._begin_backward(stage)
        if self._flat:  # the buffer is allocated before gradients are added to it
            self._sum(stage, early=True)
        moment = self._moment(fresh, others + held, memory.backward_input - held)
        if self._runtime:
            self._add_made(stage)
        else:
            self._sum(stage, early=True)
        end = self._moment(memory.embedding_gradient, others + memory.deferred, 0)
        self._end_backward(stage, others + memory.deferred, split=True)
        return moment if sum(moment) >= sum(end) else end

    def _full_backward(self, stage: int) -> Moment | None:
        memory = self._memory[stage]
        others = self._begin_backward(stage)
        held = memory.activations
        if self._flat:
            self._sum(stage, early=True)
            self._sum(stage, early=False)
        begin = self._moment(0, others + held, memory.full_backward - held)
        self._add_made(stage)
        self._sum(stage, early=True)
        self._sum(stage, early=False)
        end = self._moment(memory.fresh_gradients + memory.embedding_gradient, others, 0)
        self._end_backward(stage, others, split=False)
        return begin if sum(begin) >= sum(end) else end

    def _backward_weight(self, stage: int) -> Moment | None:
        if self._runtime and stage == 0:
            return self._full_backward(stage)
        memory = self._memory[stage]
        if self._flat:  # the buffer is allocated before gradients are added to it
            self._sum(stage, early=False)
            begin = self._moment(0, self.activations, memory.joined)
            self.activations -= memory.deferred
            return begin
        self.activations -= memory.deferred
        if self._runtime and self._keeps_output(stage):
            self.activations += memory.boundary
        if self._runtime and memory.made_gradients:
            if stage not in self._made:  # they are kept beside the sum until the next backward
                self._made.add(stage)
                self.gradients += memory.made_gradients
            return None
        fresh = memory.fresh_gradients * (1 - self._share(memory))
        if (stage, False) not in self._summed:
            fresh = 0  # they become the sum one by one
        moment = self._moment(int(fresh), self.activations, 0)
        self._sum(stage, early=False)
        return moment

    def _add_made(self, stage: int) -> None:
        """Add to the sum the weight gradients that were made since the last backward."""
        if stage in self._made:
            self._made.remove(stage)
            self.gradients -= self._memory[stage].made_gradients
            self._sum(stage, early=True)
            self._sum(stage, early=False)

    def _reduce(self, stage: int) -> Moment | None:
        memory = self._memory[stage]
        stages: tuple[int, ...] = (stage,)
        if stage in self._shared:  # both are reduced together, after the first
            stages = (0, self._last) if stage == 0 else ()
        self._add_made(stage)
        step = memory.reduction_step
        self.copy = self.copy + step if self._one_buffer else max(self.copy, step)
        moment = self._moment(0, self.activations, 0)
        self._keep(stage)
        for part in product(stages, (True, False)):
            if part in self._summed:
                self._summed.remove(part)
                self.gradients -= self._size(*part)
        self.copy, self._copied = memory.reduction_copy, stage if self._flat else -1
        if self._flat and (whole := memory.unsharded_gradients):
            sizes = {early: self._size(stage, early) for early in (True, False)}
            self._copies = {e: int(memory.reduction_copy * n / whole) for e, n in sizes.items()}
        return moment

    def _reduce_replicas(self, stage: int) -> Moment | None:
        flat = self._memory[stage].flat_gradients
        return (self.gradients, self.activations, flat) if flat else None

    def _moment(self, fresh: int, activations: int, workspace: int) -> Moment:
        return self.gradients + fresh, activations, workspace + self.copy

    def _begin_backward(self, stage: int) -> int:
        """Remove this microbatch's activations and the gradient that came in; returns the
        activations of the others."""
        self._use(stage)
        memory = self._memory[stage]
        incoming = memory.boundary if stage < self._last else 0
        return self.activations - memory.activations - incoming

    def _end_backward(self, stage: int, activations: int, *, split: bool) -> None:
        """Count what stays: a gradient that is for another stage of this rank and, with torch's
        runtime, messages."""
        stays = int(stage - 1 in self._local)
        if self._runtime:
            # What torch's runtime holds of a microbatch from a stage's backward to the end of the
            # step (torch 2.13, ``distributed/pipelining/stage.py`` and ``_backward.py``): the
            # stage's input and the gradient of its output, which are permanent buffers or what a
            # stage of this rank has put in their place (``set_local_fwd_input``), and the gradient
            # of its input, if it is sent and what is sent is kept, or if the backward is ``split``,
            # which leaves it in the input's ``grad``. If a stage of this rank gets it, it replaces
            # a buffer.
            gradient = stage > 0 and not stays and (split or self._keeps_sent)
            output = not split and self._keeps_output(stage)
            stays = (stage > 0) + (stage < self._last) + gradient + output
        self.activations = activations + stays * self._memory[stage].boundary

    def _keeps_output(self, stage: int) -> bool:
        """Whether torch's runtime holds a stage's output to the end of the step, when its backward
        is over: in a buffer of the next stage, if that is on this rank, or because it was sent."""
        return stage in self._local or (self._keeps_sent and stage < self._last)

    def _sum(self, stage: int, *, early: bool) -> None:
        """Count the gradients of a stage at their first appearance since the last reduction."""
        if (stage, early) not in self._summed:
            self._summed.add((stage, early))
            # What the last reduction of a flat chunk holds of them is freed before, also for
            # another chunk where there is one buffer.
            if stage == self._copied or (self._one_buffer and not early):
                self.copy -= self._copies.pop(early, 0)
            self.gradients += self._size(stage, early)
            if not self._memory[stage].unsharded_gradients:
                self._keep(stage)

    def _keep(self, stage: int) -> None:
        """From now on count the gradients of a stage for the optimizer."""
        if not self._resident and stage not in self._reduced:
            self._reduced.add(stage)
            self.gradients += self._memory[stage].gradients

    def _size(self, stage: int, early: bool) -> int:
        memory = self._memory[stage]
        first = memory.early_gradients
        return first if early else memory.unsharded_gradients - first

    @staticmethod
    def _share(memory: StageMemory) -> float:
        """The share of a stage's gradients that comes with the input gradient."""
        whole = memory.unsharded_gradients
        return memory.early_gradients / whole if whole else 0.0


class MemoryChange(NamedTuple):
    """The bytes that a rank holds at one action, in addition to those that are always held."""

    place: int  # index of the action in the program
    grew: bool  # true: held from the action's start on; false: from its end on
    unsharded: int
    gradients: int  # without those that are always held
    activations: int
    workspace: int

    @property
    def total(self) -> int:
        """The sum of these bytes."""
        return self.unsharded + self.gradients + self.activations + self.workspace


def peak_memory(plan: Plan, price: StepBytes) -> tuple[MemoryBytes, ...]:
    """Bytes by kind at the peak of every pipeline rank."""
    return tuple(rank_peak(plan, price, rank) for rank in range(plan.schedule.num_ranks))


def rank_peak(plan: Plan, price: StepBytes, rank: int) -> MemoryBytes:
    """Bytes by kind at the peak of one pipeline rank."""
    most, fullest, state = -1, _EMPTY, RankMemory(plan, price, rank)
    handlers, loads = state.handlers, bool(plan.offloaded_stages)
    for index, (stage, op, microbatch) in enumerate(plan.schedule.programs[rank]):
        if op not in handlers:
            continue
        if loads:
            state.begin(stage, op, microbatch)
        if moment := handlers[op](stage):
            gradients, activations, workspace = moment
            total = state.unsharded + gradients + activations + workspace
            if total > most:
                most, fullest = total, MemoryChange(index, True, state.unsharded, *moment)
        total = state.unsharded + state.gradients + state.activations + state.copy
        if total > most:
            most, fullest = total, state.left(index, op)
    return replace(as_memory(plan, price, rank, fullest), host=state.most_host)


def needed_bytes(plan: Plan, price: StepBytes, rank: int) -> int:
    """The peak of one pipeline rank in bytes; more than any device has where it needs more of its
    host's memory than it may."""
    peak = rank_peak(plan, price, rank)
    return peak.total + (TOO_MANY if peak.host > price.host_limit else 0)


def always_held(plan: SizedPlan, price: StepBytes, rank: int) -> MemoryBytes:
    """The bytes that a rank holds all the time, whatever the order of its actions is."""
    stages = [price.memory[s] for s in plan.schedule.stages_of(rank)]
    return MemoryBytes(
        parameters=sum(m.parameters for m in stages),
        gradients=sum(m.gradients for m in stages) if price.resident_gradients else 0,
        optimizer=sum(m.optimizer for m in stages),
        activations=sum(m.buffers for m in stages),
    )


def as_memory(plan: Plan, price: StepBytes, rank: int, change: MemoryChange) -> MemoryBytes:
    """All bytes of a rank at one change, with those that are always held."""
    always = always_held(plan, price, rank)
    return replace(
        always,
        unsharded=change.unsharded,
        gradients=always.gradients + change.gradients,
        activations=always.activations + change.activations,
        workspace=change.workspace,
    )


def walk(plan: Plan, price: StepBytes, rank: int) -> Iterator[MemoryChange]:
    """The changes of a rank: for every action that changes memory, its fullest moment and what it
    leaves."""
    state = RankMemory(plan, price, rank)
    yield _EMPTY
    for index, (stage, op, microbatch) in enumerate(plan.schedule.programs[rank]):
        if op in state.handlers:
            state.begin(stage, op, microbatch)
            if moment := state.handlers[op](stage):
                yield MemoryChange(index, True, state.unsharded, *moment)
            yield state.left(index, op)


TOO_MANY = 2**60  # bytes
_EMPTY = MemoryChange(0, True, 0, 0, 0, 0)
GROWING = frozenset({Op.UNSHARD, Op.RECV_F, Op.RECV_B, Op.LOAD})
_BACKWARDS = NEEDS_PARAMETERS - {Op.FORWARD}
