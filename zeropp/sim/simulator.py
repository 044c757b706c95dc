"""The simulated step of a Plan on a cluster: time, bubble, communication, memory, Timeline.

The inputs are the Plan's programs and the cost model's price of it. The event loop places the
actions in time; this module adds what concerns the step as a whole: reductions over replicas, the
optimizer, ZeRO-1's all-gather, and memory.

Assumptions: a rank has one compute stream; collectives of the shard group, collectives over the
replicas and transfers between stages are lanes that overlap it. While collectives run, compute
takes ``overlap_slowdown`` longer, spread evenly over the rank's actions. All pipelines of the job
do the same at the same time, so one of them is simulated, at the speed of the job's slowest node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from zeropp.cluster import Cluster
from zeropp.cost import price_plan
from zeropp.cost.plan_price import PlanPrice, StageExtras
from zeropp.plan import MemoryBytes, Plan
from zeropp.schedule.event_loop import EventResult, run, run_within
from zeropp.schedule.program import COMPLETES, COMPUTE, Op, StageCost
from zeropp.sim.lost_time import TimeBreakdown, breakdown_of
from zeropp.sim.memory import peak_memory
from zeropp.timeline import Span, Timeline


@dataclass(frozen=True)
class Tail:
    """When one pipeline rank does what follows its last weight gradient, since the step's start."""

    reduced_s: float  # its gradients are reduced over shards and replicas
    updated_s: float  # its optimizer has stepped
    end_s: float  # its parameters are gathered again, if ZeRO-1 scattered them


@dataclass(frozen=True)
class SimResult:
    """One simulated step. Everything except for the step time is computed when it is asked for."""

    plan: Plan
    price: PlanPrice
    events: EventResult
    tails: tuple[Tail, ...]  # one per pipeline rank

    @cached_property
    def step_s(self) -> float:
        """Seconds of one step, from its first action to its last. If steps overlap, from a rank's
        first forward to its last action, because each rank then begins its next step (arXiv
        2401.10241, section 4)."""
        if self.price.steps_overlap:
            begins = self._first_passes_s()
            return max(tail.end_s - begin for tail, begin in zip(self.tails, begins, strict=True))
        return max(self.events.step_s, max(tail.end_s for tail in self.tails))

    def _first_passes_s(self) -> list[float]:
        """When the first forward of every rank starts."""
        begins: dict[int, float] = {}
        for action, start in zip(self.events.sequence, self.events.starts, strict=True):
            if action.op in COMPUTE:
                begins.setdefault(self.events.stage_rank[action.stage], start)
                if len(begins) == len(self.tails):
                    break
        return [begins[rank] for rank in range(len(self.tails))]

    @property
    def tokens_per_s_per_gpu(self) -> float:
        """Tokens per second and GPU."""
        tokens = self.plan.global_batch * self.plan.shape.seq
        return tokens / self.step_s / self.plan.layout.world

    @property
    def bubble(self) -> float:
        """The share of the step in which the busiest rank does not compute."""
        return 1.0 - max(self.events.busy) / self.step_s

    @property
    def limit_share(self) -> float:
        """The throughput divided by the compute limit (``zeropp.cost.price``); at 1 a step
        would consist of the model's own kernels only."""
        return self.price.limit_s / self.step_s

    @cached_property
    def breakdown(self) -> TimeBreakdown:
        """The seconds of the step by cause, which add up to ``step_s``."""
        return breakdown_of(self.plan, self.price, lambda price: _run(self.plan, price).step_s)

    @cached_property
    def memory(self) -> tuple[MemoryBytes, ...]:
        """Bytes by kind at the peak of every pipeline rank."""
        return peak_memory(self.plan, self.price)

    @property
    def peak_bytes(self) -> int:
        """The peak of the fullest rank in bytes."""
        return max(memory.total for memory in self.memory)

    def timeline(self) -> Timeline:
        """The spans of the step, with those of the optimizer."""
        last = []
        for rank, tail in enumerate(self.tails):
            last.append(Span(rank, "compute", "optimizer", tail.reduced_s, tail.updated_s))
            last.append(Span(rank, "gather", "zero1 all-gather", tail.updated_s, tail.end_s))
        last = [span for span in last if span.end_s > span.start_s]
        title = f"{self.plan.shape.name} {self.plan.contender} {self.plan.layout.world} GPUs"
        return Timeline(title, "simulated", (*self.events.spans(), *last))


def simulate(
    plan: Plan,
    cluster: Cluster,
    *,
    price: PlanPrice | None = None,
    costs: Sequence[StageCost] | None = None,
) -> SimResult:
    """Simulate a step of a plan on a cluster.

    ``price`` is the plan's price, if the caller has it. ``costs`` (one per stage, in seconds)
    replace the model's durations, for example by traced ones. Raises DeadlockError if the programs
    cannot end.
    """
    price = price or price_plan(plan, cluster)
    if costs is not None:
        price = replace(price, stages=tuple(costs))
    return _run(plan, price)


def simulate_within(plan: Plan, price: PlanPrice, limit_s: float) -> SimResult | None:
    """Simulate a step, but give up as soon as it certainly takes ``limit_s`` or longer, and then
    return None. Where steps overlap, this is known at the end only."""
    if price.steps_overlap:
        return _run(plan, price)
    events = run_within(plan.schedule, _stretched(plan, price), limit_s)
    return _result(plan, price, events) if events else None


def _run(plan: Plan, price: PlanPrice) -> SimResult:
    return _result(plan, price, run(plan.schedule, _stretched(plan, price)))


def _result(plan: Plan, price: PlanPrice, events: EventResult) -> SimResult:
    done = _done(plan, events)
    tails = tuple(_tail(done[rank], rank, price) for rank in range(plan.schedule.num_ranks))
    return SimResult(plan, price, events, tails)


def _stretched(plan: Plan, price: PlanPrice) -> list[StageCost]:
    """The stage costs with compute that is slowed by overlapping collectives and by the slowest
    node of the job."""
    if not price.overlap_slowdown and price.stragglers == 1.0:
        return list(price.stages)
    costs = list(price.stages)
    for rank, collectives in enumerate(plan.schedule.collectives):
        beside = _crossings_beside_s(plan, price, rank)
        for stage, op, _ in collectives:
            beside += costs[stage].unshard if op is Op.UNSHARD else costs[stage].reduce_grad
        stages = plan.schedule.stages_of(rank)
        compute = plan.num_microbatches * sum(costs[s].compute for s in stages)
        factor = 1.0 + price.overlap_slowdown * min(1.0, beside / compute)
        factor *= price.stragglers
        for s in stages:
            costs[s] = slowed_cost(costs[s], price.extras[s], factor)
    return costs


def slowed_cost(cost: StageCost, extras: StageExtras, factor: float) -> StageCost:
    """A stage's cost with compute that takes ``factor`` times as long. Exposed tensor-parallel
    collectives are part of compute, but slow nodes do not slow them."""
    forward, backward = extras.tensor_forward, extras.tensor_backward
    return replace(
        cost,
        forward=(cost.forward - forward) * factor + forward,
        backward_input=(cost.backward_input - backward) * factor + backward,
        backward_weight=cost.backward_weight * factor,
    )


def _crossings_beside_s(plan: Plan, price: PlanPrice, rank: int) -> float:
    """Seconds of a rank's reductions over the replicas that overlap its compute: all except for the
    last one."""
    if not any(price.replica_s):
        return 0.0
    first_ends, last = plan.schedule.gradient_stages[rank]
    return sum(price.replica_s[stage] for stage in first_ends) - price.replica_s[last]


def _tail(done: Sequence[tuple[float, int]], rank: int, price: PlanPrice) -> Tail:
    """Reductions over replicas, in the order in which the stages are ready, then the optimizer."""
    reduced = 0.0
    for time, stage in sorted(done):
        reduced = max(reduced, time) + price.replica_s[stage]
    updated = reduced + price.finish_s[rank]
    return Tail(reduced, updated, updated + price.gather_updated_s[rank])


def _done(plan: Plan, events: EventResult) -> list[list[tuple[float, int]]]:
    """(time, stage) at which gradients can be reduced over the replicas, by rank: at a stage's last
    reduction or weight gradient."""
    done: list[list[tuple[float, int]]] = [[] for _ in events.programs]
    left = set(range(plan.schedule.num_stages))
    for (stage, op, _), end in zip(reversed(events.sequence), reversed(events.ends), strict=True):
        if stage in left and op in COMPLETES:
            done[events.stage_rank[stage]].append((end, stage))
            left.discard(stage)
            if not left:
                break
    return done
