"""Lower bounds of a plan's step time and memory, with which the tuner avoids simulations.

Both hold for every order of actions that the generators can make; a test compares them with the
simulator. They need only a plan whose order is not chosen yet, and its price.
"""

from __future__ import annotations

from collections.abc import Sequence

from zeropp.cluster import Cluster
from zeropp.cost import PlanPrice, StepTimes
from zeropp.cost.stage_costs import passes_s, work_of
from zeropp.cost.tensor_parallel import tensor_times
from zeropp.plan import SizedPlan
from zeropp.schedule.program import ScheduleSizes

_ROUNDING = 1e-9  # the share by which sums of the same durations may differ
_SPLIT = frozenset({"zeropp", "zb_h1", "interleaved_zb", "zbv", "dualpipev"})


def least_compute_s(plan: SizedPlan, cluster: Cluster) -> float:
    """The cheapest bound, which needs no price: that of ``least_step_s`` for compute alone."""
    work = work_of(plan, cluster)
    passes = passes_s(plan, work, tensor_times(plan, cluster, work))
    overlap = work.program.post_validation
    least = _least_compute_s(passes, plan.schedule, _splits(plan), steps_overlap=overlap)
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


def _splits(plan: SizedPlan) -> bool:
    """Whether input gradients do not wait for weight gradients."""
    return plan.schedule.name in _SPLIT and plan.split_backward


def least_step_s(plan: SizedPlan, price: StepTimes) -> float:
    """Seconds that no order can beat: the way to a rank, its work, and the way back.

    A rank starts no sooner than a microbatch has come through the stages before its first, unless
    steps overlap. Its compute takes the time of all its microbatches, and its link that of all its
    gathers and reductions. After its last input gradient, the gradient still goes back to stage 0,
    whose rank then ends its step.
    """
    schedule = plan.schedule
    split = _splits(plan)
    arrive, back = [0.0], [0.0]
    for cost in price.stages[:-1]:
        arrive.append(arrive[-1] + cost.forward)
        back.append(back[-1] + cost.backward_input + (0.0 if split else cost.backward_weight))
    after = [sum(both) for both in zip(price.finish_s, price.gather_updated_s, strict=True)]
    worst = 0.0
    for rank in range(schedule.num_ranks):
        stages = schedule.stages_of(rank)
        first = stages[0]
        beside = _link_s(plan, price, stages)
        work, slowed = _work_s(plan, price, stages, beside)
        weights = sum(price.stages[s].backward_weight for s in stages) * split
        back_at_0 = arrive[first] + work - weights * plan.num_microbatches * slowed + back[first]
        own = work if price.steps_overlap else arrive[first] + work
        worst = max(
            worst, max(own, beside) + after[rank], back_at_0 + after[schedule.stage_rank[0]]
        )
    return worst


def _work_s(
    plan: SizedPlan, price: StepTimes, stages: tuple[int, ...], beside: float
) -> tuple[float, float]:
    """Seconds of a rank's compute, slowed by at least ``beside`` seconds of collectives, and the
    factor by which they slow it."""
    m = plan.num_microbatches
    work = sum(price.stages[s].compute for s in stages) * m
    slowed = price.stragglers * (1.0 + price.overlap_slowdown * min(1.0, beside / work))
    tensor = sum(price.extras[s].tensor for s in stages) * m
    return (work - tensor) * slowed + tensor + _copies_s(plan, price, stages), slowed


def _link_s(plan: SizedPlan, price: StepTimes, stages: tuple[int, ...]) -> float:
    """The least seconds of a rank's reductions and gathers. Each stage between its first and its
    last is gathered at least once per unit; the first and the last may stay gathered from one phase
    to the next, and phases of two units may overlap."""
    units = plan.num_units
    reductions = units if plan.reduce_every == "unit" else 1
    reduced = sum(price.stages[s].reduce_grad for s in stages) * reductions
    return reduced + units * sum(price.stages[s].unshard for s in stages[1:-1])


def _copies_s(plan: SizedPlan, price: StepTimes, stages: tuple[int, ...]) -> float:
    """Seconds of compute for the copies of the same gathers and reductions."""
    units = plan.num_units
    reductions = units if plan.reduce_every == "unit" else 1
    copied = sum(price.stages[s].copy_in for s in stages) * reductions
    return copied + units * sum(price.stages[s].copy_out for s in stages[1:-1])


def least_bytes(plan: SizedPlan, price: PlanPrice) -> int:
    """The least peak of the fullest rank in bytes: in the forward that fills its memory, or when
    the optimizer has all gradients."""
    schedule = plan.schedule
    worst = 0
    for rank in range(schedule.num_ranks):
        memory = [price.memory[s] for s in schedule.stages_of(rank)]
        resident = sum(m.parameters + m.optimizer for m in memory)
        gradients = sum(m.gradients for m in memory)
        kept = _least_activations(plan, rank, [m.activations for m in memory])
        filled = kept + min(m.unsharded + m.forward - m.activations for m in memory)
        filled = max(filled, _least_gradients(plan, [m.unsharded_gradients for m in memory]))
        if price.resident_gradients:
            filled += gradients
        worst = max(worst, resident + max(filled, gradients))
    return worst


def _least_gradients(plan: SizedPlan, sizes: list[int]) -> int:
    """The bytes of unsharded gradients that are held together at least once; ``sizes`` are per
    chunk. Weight gradients come unit by unit. So gradients that are reduced once per step exist in
    all chunks before the first reduction; otherwise those of one chunk come while the copy of the
    chunk before is reduced."""
    units = plan.num_units
    if plan.reduce_every == "step" and units > 1:
        return sum(sizes)
    return max(sizes) + (min(sizes) if units * len(sizes) > 1 else 0)


def _least_activations(plan: SizedPlan, rank: int, sizes: list[int]) -> int:
    """The bytes of chunk-activations that are held together at least once; ``sizes`` are per
    chunk."""
    name, m, pp = plan.schedule.name, plan.num_microbatches, plan.layout.pp
    chunks = len(sizes)
    way_round = 2 * (pp - rank) - 1  # forwards before the first input gradient can arrive
    if name in ("1f1b", "zb_h1"):
        return min(m, pp - rank) * sizes[0]
    if name == "interleaved_1f1b":
        return min(m * chunks, way_round - 1 + (chunks - 1) * pp + 1) * min(sizes)
    if name == "zeropp" and plan.stage_style == "loop":
        unit = plan.schedule.unit
        last = min(unit, way_round, plan.activation_cap - (chunks - 1) * unit)
        return unit * sum(sizes[:-1]) + last * sizes[-1]
    return sum(sizes) if name == "accumulation" else min(sizes)
