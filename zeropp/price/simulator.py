"""The simulated step of a Plan on a cluster: time, bubble, communication, memory, Timeline.

The inputs are the Plan's programs and the cost model's price of it. The event loop places the
actions in time; this module adds what concerns the step as a whole: how collectives slow compute,
where the time goes, and memory.

Assumptions: a rank has one compute stream; collectives of the shard group, collectives over the
replicas and transfers between stages are lanes that overlap it. While collectives run, compute
takes ``overlap_slowdown`` longer, spread evenly over the rank's actions. All pipelines of the job
do the same at the same time, so one of them is simulated, at the speed of the job's slowest node.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from zeropp.price import price_plan
from zeropp.price.cluster import Cluster
from zeropp.price.lost_time import TimeBreakdown, breakdown_of
from zeropp.price.peak_memory import peak_memory
from zeropp.price.plan_price import PlanPrice, StageExtras
from zeropp.schedule.event_loop import EventResult, run, run_within
from zeropp.schedule.plan import MemoryBytes, Plan
from zeropp.schedule.program import COMPUTE, Op, StageCost
from zeropp.types.frozen import replace
from zeropp.types.timeline import Timeline


@dataclass(frozen=True)
class SimResult:
    """One simulated step. Everything except for the step time is computed when it is asked for."""

    plan: Plan
    price: PlanPrice
    events: EventResult

    @cached_property
    def step_s(self) -> float:
        """Seconds of one step, from its first action to its last. If steps overlap, from a rank's
        first forward to its last action, because each rank then begins its next step (arXiv
        2401.10241, section 4)."""
        if not self.price.steps_overlap:
            return self.events.step_s
        begins: dict[int, float] = {}  # of every rank's first forward
        for action, start in zip(self.events.sequence, self.events.starts, strict=True):
            if action.op in COMPUTE:
                begins.setdefault(self.events.stage_rank[action.stage], start)
                if len(begins) == self.plan.schedule.num_ranks:
                    break
        return max(end - begins[rank] for rank, end in enumerate(self.events.updated))

    @property
    def tokens_per_s_per_gpu(self) -> float:
        """Tokens per second and GPU."""
        return self.plan.global_batch * self.plan.shape.seq / self.step_s / self.plan.layout.world

    @property
    def bubble(self) -> float:
        """The share of the step in which the busiest rank does not compute."""
        return 1.0 - max(self.events.busy) / self.step_s

    @property
    def limit_share(self) -> float:
        """The throughput divided by the compute limit (``zeropp.price.compute_limit``); at 1 a step
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

    def fits(self, limit_bytes: float) -> bool:
        """Whether no rank has more bytes on its device than the limit, nor more in the memory of
        its host than it may."""
        most = max(memory.host for memory in self.memory)
        return self.peak_bytes <= limit_bytes and most <= self.price.host_limit

    def timeline(self) -> Timeline:
        """The spans of the step."""
        title = f"{self.plan.shape.name} {self.plan.contender} {self.plan.layout.world} GPUs"
        return Timeline(title, "simulated", self.events.spans())


def simulate(
    plan: Plan,
    cluster: Cluster,
    *,
    price: PlanPrice | None = None,
) -> SimResult:
    """Simulate a step of a plan on a cluster.

    ``price`` is the plan's price, if the caller has it. Raises DeadlockError if the programs cannot
    end, and ValueError if they are not those of a whole step (``SizedPlan.ordered``).
    """
    if any(p[-1].op not in (Op.UPDATE, Op.GATHER_UPDATED) for p in plan.schedule.programs):
        raise ValueError(f"schedule {plan.schedule.name}: the programs end without an update")
    return _run(plan, price or price_plan(plan, cluster))


def simulate_within(plan: Plan, price: PlanPrice, limit_s: float) -> SimResult | None:
    """Simulate a step, but give up as soon as it certainly takes ``limit_s`` or longer, and then
    return None. Where steps overlap, this is known at the end only."""
    if price.steps_overlap:
        return _run(plan, price)
    events = run_within(plan.schedule, _stretched(plan, price), limit_s)
    return SimResult(plan, price, events) if events else None


def _run(plan: Plan, price: PlanPrice) -> SimResult:
    return SimResult(plan, price, run(plan.schedule, _stretched(plan, price)))


def _stretched(plan: Plan, price: PlanPrice) -> list[StageCost]:
    """The stage costs with compute that is slowed by overlapping collectives and by the slowest
    node of the job."""
    if not price.overlap_slowdown and price.stragglers == 1.0:
        return list(price.stages)
    costs = list(price.stages)
    for rank, collectives in enumerate(plan.schedule.collectives):
        beside = copies = 0.0
        first: dict[Op, float] = {}
        last: dict[Op, float] = {}
        for stage, op, _ in collectives:
            cost, waits = costs[stage], price.extras[stage].waits
            if op is Op.UNSHARD:
                seconds = max(0.0, cost.unshard - waits)
                copies += cost.copy_out
                first.setdefault(op, seconds)
            else:
                is_shard = op is Op.REDUCE_GRAD
                moving = max(0.0, cost.reduce_grad - waits)
                seconds = moving if is_shard else cost.reduce_replicas
                copies += cost.copy_in * is_shard
                if cost.waits_for_reduction:
                    continue
                last[op] = seconds
            beside += seconds
        # All but the first gather and the last reductions have compute beside them.
        beside -= sum(first.values()) + sum(last.values())
        stages = plan.schedule.stages_of(rank)
        beside += sum(price.extras[s].hidden_replicas for s in stages)
        compute = plan.num_microbatches * sum(costs[s].compute for s in stages) + copies
        compute *= price.stragglers
        # Layers that only reshape cost nothing.
        share = min(1.0, beside / compute) if compute else 0.0
        factor = (1.0 + price.overlap_slowdown * share) * price.stragglers
        for s in stages:
            costs[s] = slowed_cost(costs[s], price.extras[s], factor)
            left = 1.0 - price.network_share * share
            costs[s] = replace(costs[s], store=costs[s].store / left, load=costs[s].load / left)
    return costs


def slowed_cost(cost: StageCost, extras: StageExtras, factor: float) -> StageCost:
    """A stage's cost with compute that takes ``factor`` times as long. The collectives that compute
    waits for are part of its durations, but slow nodes do not slow them."""
    forward, backward = extras.tensor_forward + extras.gathers, extras.tensor_backward
    weight = extras.reductions
    return replace(
        cost,
        forward=(cost.forward - forward) * factor + forward,
        backward_input=(cost.backward_input - backward) * factor + backward,
        backward_weight=(cost.backward_weight - weight) * factor + weight,
        copy_out=cost.copy_out * factor,
        copy_in=cost.copy_in * factor,
    )
