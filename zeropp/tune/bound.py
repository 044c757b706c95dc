"""Lower bounds of a plan's step time, with which the tuner avoids simulations.

They are bounds for every order of actions that the contenders' planners make; tests compare them
with the simulator for all contenders, over drawn tasks. They need only a plan whose order is not
chosen yet, and its price.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from zeropp.cluster import Cluster
from zeropp.cost import StepTimes
from zeropp.cost.stage_costs import passes_s, work_of
from zeropp.cost.tensor_parallel import tensor_times
from zeropp.plan import SizedPlan
from zeropp.schedule.event_loop import run_within
from zeropp.schedule.program import Schedule, ScheduleSizes
from zeropp.sim.simulator import slowed_cost
from zeropp.tune.hold_time import least_by_hold_time_s
from zeropp.tune.latency import Latency, first_gather_s, splits

_ROUNDING = 1e-9  # the share by which sums of the same durations may differ


def least_compute_s(plan: SizedPlan, cluster: Cluster) -> float:
    """The cheapest bound, which needs no price: that of ``least_step_s`` for compute alone."""
    work = work_of(plan, cluster)
    passes = passes_s(plan, work, tensor_times(plan, cluster, work))
    overlap = work.program.post_validation
    least = _least_compute_s(passes, plan.schedule, splits(plan), steps_overlap=overlap)
    return least * (1.0 - _ROUNDING)


def _least_compute_s(
    passes: Sequence[tuple[float, float, float]],
    schedule: ScheduleSizes,
    split: bool,
    *,
    steps_overlap: bool,
) -> float:
    m, arrive, back = schedule.num_microbatches, 0.0, 0.0
    # For every rank, the seconds of the stages before its first one: of forwards, of backwards.
    begin: dict[int, tuple[float, float]] = {}
    work, weights = [0.0] * schedule.num_ranks, [0.0] * schedule.num_ranks
    for rank, (forward, input_, weight) in zip(schedule.stage_rank, passes, strict=True):
        begin.setdefault(rank, (arrive, back))
        work[rank] += m * (forward + input_ + weight)
        weights[rank] += m * weight if split else 0.0
        arrive += forward
        back += input_ if split else input_ + weight
    worst = 0.0
    for rank, (to, fro) in begin.items():
        own = work[rank] if steps_overlap else to + work[rank]
        worst = max(worst, own, to + work[rank] - weights[rank] + fro)
    return worst


def least_step_s(plan: SizedPlan, price: StepTimes) -> float:
    """Seconds that no order can beat: the largest of several bounds of every rank.

    A rank starts no sooner than a microbatch has come through the stages before its first one,
    unless steps overlap, and than its first stage is gathered. Its compute takes the time of all
    its microbatches, and its link that of all its gathers and reductions; after its last weight
    gradient come at least the reductions of one stage. After its last input gradient, the gradient
    still goes back to stage 0, whose rank then makes the weight gradient that belongs to it. Where
    activations are capped, a rank fills and drains slowly (``_capped_s``).
    """
    latency = Latency.of(plan, price)
    ends = [_Ends.of(plan, price, rank) for rank in range(plan.schedule.num_ranks)]
    last = ends[plan.schedule.stage_rank[0]]
    worst = 0.0
    for rank, end in enumerate(ends):
        stages = plan.schedule.stages_of(rank)
        first = stages[0]
        beside = _link_s(plan, price, stages)
        work, slowed = _work_s(plan, price, stages, beside)
        copied = sum(price.stages[s].copy_in for s in stages) * _reductions(plan)
        start = max(latency.to[first], first_gather_s(plan, price, first))
        own = work + copied + (0.0 if price.steps_overlap else start)
        worst = max(worst, max(own + end.reduced_s, beside + end.crossed_s) + end.updated_s)
        if first:
            weights = sum(price.stages[s].backward_weight for s in stages) * splits(plan)
            at_0 = start + work - weights * plan.num_microbatches * slowed + latency.back[first]
            worst = max(worst, at_0 + latency.last_weight + last.reduced_s + last.updated_s)
        if plan.activation_cap:
            worst = max(
                worst, _capped_s(plan, price, latency, rank, slowed=slowed) + last.updated_s
            )
            if not price.steps_overlap:
                held = least_by_hold_time_s(plan, latency, stages)
                worst = max(worst, held + end.reduced_s + end.updated_s)
    return worst


def least_of_order_s(
    compute: Schedule, plan: SizedPlan, price: StepTimes, limit_s: float = float("inf")
) -> float:
    """Seconds that the plan's step takes at least if every rank has its compute actions in the
    order of ``compute``, which has no other actions; infinite once they are certainly ``limit_s``
    or more. All actions follow the gather of stage 0."""
    if price.steps_overlap:
        return 0.0
    costs, ranks = list(price.stages), range(plan.schedule.num_ranks)
    for stages in map(plan.schedule.stages_of, ranks):
        _, slowed = _work_s(plan, price, stages, _link_s(plan, price, stages))
        for s in stages:
            costs[s] = slowed_cost(price.stages[s], price.extras[s], slowed)
    ends = (_Ends.of(plan, price, rank) for rank in ranks)
    beside = first_gather_s(plan, price, 0) + min(end.reduced_s + end.updated_s for end in ends)
    events = run_within(compute, costs, limit_s - beside)
    return (beside + events.step_s) * (1.0 - _ROUNDING) if events else float("inf")


@dataclass(frozen=True)
class _Ends:
    """The least seconds of a rank after its last weight gradient."""

    reduced_s: float  # over shards and replicas
    crossed_s: float  # over the replicas alone
    updated_s: float  # optimizer and ZeRO-1's gather

    @classmethod
    def of(cls, plan: SizedPlan, price: StepTimes, rank: int) -> _Ends:
        stages = plan.schedule.stages_of(rank)
        return cls(
            min(price.stages[s].reduce_grad + price.replica_s[s] for s in stages),
            min(price.replica_s[s] for s in stages),
            price.finish_s[rank] + price.gather_updated_s[rank],
        )


def _capped_s(
    plan: SizedPlan, price: StepTimes, latency: Latency, rank: int, *, slowed: float
) -> float:
    """Seconds until rank 0 has its last weight gradient, by the activations that ``rank`` may hold.

    Before its first backward a rank makes forwards alone, and after its last forward only backwards
    of what it still holds; both are no more than the cap. The first backward has come through all
    stages and back, and so has the last forward to go. All work besides is between the two.
    """
    schedule, m = plan.schedule, plan.num_microbatches
    stages, costs = schedule.stages_of(rank), price.stages
    most = plan.activation_cap
    if most >= m * len(stages):
        return 0.0  # all forwards may come before the first backward
    tail, last = latency.backward[-1], stages[-1]
    begin = latency.backward[last]
    first_backward = latency.turn + tail + latency.back[-1] - latency.back[last] - begin
    after_forward = latency.turn - latency.to[last] - costs[last].forward + tail + latency.back[-1]
    forwards = max(costs[s].forward for s in stages)
    backwards = max(costs[s].backward_input + costs[s].backward_weight for s in stages)
    work = m * sum(costs[s].compute for s in stages) - most * (forwards + backwards)
    tensor = m * sum(price.extras[s].tensor for s in stages)
    between = max(0.0, work * slowed - tensor * (slowed - 1.0))
    return first_backward + between + after_forward + latency.last_weight


def _work_s(
    plan: SizedPlan, price: StepTimes, stages: tuple[int, ...], beside: float
) -> tuple[float, float]:
    """Seconds of a rank's compute, slowed by at least ``beside`` seconds of collectives of the
    shard group and by reductions over the replicas, and the factor by which they slow it. The
    copies of gathers are part of it; those of reductions are not, as they may come last."""
    m = plan.num_microbatches
    crossings = [price.replica_s[s] for s in stages]
    beside += sum(crossings) - max(crossings)  # the last one slows nothing
    work = sum(price.stages[s].compute for s in stages) * m
    slowed = price.stragglers * (1.0 + price.overlap_slowdown * min(1.0, beside / work))
    tensor = sum(price.extras[s].tensor for s in stages) * m
    copied = sum(price.stages[s].copy_out * n for s, n in _gathers(plan, stages))
    return (work - tensor) * slowed + tensor + copied, slowed


def _link_s(plan: SizedPlan, price: StepTimes, stages: tuple[int, ...]) -> float:
    """The least seconds of a rank's reductions and gathers."""
    costs = price.stages
    reduced = sum(costs[s].reduce_grad for s in stages) * _reductions(plan)
    return reduced + sum(costs[s].unshard * n for s, n in _gathers(plan, stages))


def _reductions(plan: SizedPlan) -> int:
    return plan.num_units if plan.reduce_every == "unit" else 1


def _gathers(plan: SizedPlan, stages: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """(stage, how often it is gathered at least). Each stage of a rank between its first and its
    last is gathered once per unit, unless it may stay gathered (``keep``); the first and the last
    may always stay gathered from one phase to the next, and phases of two units may overlap."""
    if plan.layout.shard > 1:
        units = 1 if plan.keep else plan.num_units
        yield from ((s, units if 0 < n < len(stages) - 1 else 1) for n, s in enumerate(stages))
