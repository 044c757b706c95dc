"""What a candidate takes at least, without a schedule: the tuner's reason not to simulate it.

Both bounds hold for every order of actions that the generators can give; a test compares them
with the simulator. They read a plan without programs and its price.
"""

from __future__ import annotations

from functools import lru_cache

from zeropp.cost import PlanPrice, price_plan
from zeropp.layout import Layout
from zeropp.plan import Plan
from zeropp.tune.sized_plans import sized_plan
from zeropp.tune.space import SPACES, Candidate, Task, units_of


def work_s(task: Task, family: Candidate) -> float:
    """Compute of the whole model, spread evenly over the pipeline: the cheapest bound."""
    layout = Layout(tp=family.layout.tp, sequence_parallel=family.layout.sequence_parallel)
    one = Candidate(family.contender, layout, family.microbatch_size, 1, "1f1b", family.recompute)
    whole = _microbatch_s(task, one)
    return whole * family.num_microbatches / family.layout.pp


@lru_cache(maxsize=4096)
def _microbatch_s(task: Task, one: Candidate) -> float:
    return sum(cost.compute for cost in price_plan(sized_plan(task, one), task.cluster).stages)


_SPLIT = frozenset({"zeropp", "zb_h1", "interleaved_zb", "zbv"})


def least_step_s(plan: Plan, price: PlanPrice) -> float:
    """Seconds that no order can beat: the way to a rank, its work, and the way back.

    A rank starts no sooner than a microbatch has come through the stages before its first. Its
    last input gradient has still to go back to stage 0. It is busy for all its microbatches, and
    its link for all its gathers and reductions.
    """
    schedule, m = plan.schedule, plan.num_microbatches
    split = schedule.name in _SPLIT
    arrive, back = [0.0], [0.0]
    for cost in price.stages[:-1]:
        arrive.append(arrive[-1] + cost.forward)
        back.append(back[-1] + cost.backward_input + (0.0 if split else cost.backward_weight))
    worst = 0.0
    for rank in range(max(schedule.stage_rank) + 1):
        stages = schedule.stages_of(rank)
        first = stages[0]
        beside = _link_s(plan, price, stages)
        work = sum(price.stages[s].compute for s in stages) * m
        slowed = price.stragglers * (1.0 + price.overlap_slowdown * min(1.0, beside / work))
        tensor = sum(price.extras[s].tensor for s in stages) * m
        work = (work - tensor) * slowed + tensor + _copies_s(plan, price, stages)
        weights = (
            sum(price.stages[s].backward_weight for s in stages) * m * slowed if split else 0.0
        )
        end = arrive[first] + max(work, work - weights + back[first])
        after = price.finish_s[rank] + price.gather_updated_s[rank]
        worst = max(worst, end + after, beside + after)
    return worst


def _link_s(plan: Plan, price: PlanPrice, stages: tuple[int, ...]) -> float:
    """Seconds of a rank's reductions, and of its gathers at the least: each stage between its
    first and its last is gathered at least once a unit (the ends may turn round without, and
    phases of two units may overlap)."""
    schedule = plan.schedule
    units = -(-schedule.num_microbatches // schedule.unit)
    reductions = units if plan.reduce_every == "unit" else 1
    reduced = sum(price.stages[s].reduce_grad for s in stages) * reductions
    return reduced + units * sum(price.stages[s].unshard for s in stages[1:-1])


def _copies_s(plan: Plan, price: PlanPrice, stages: tuple[int, ...]) -> float:
    """Seconds of compute for the copies of the same gathers and reductions."""
    units = -(-plan.num_microbatches // plan.schedule.unit)
    reductions = units if plan.reduce_every == "unit" else 1
    copied = sum(price.stages[s].copy_in for s in stages) * reductions
    return copied + units * sum(price.stages[s].copy_out for s in stages[1:-1])


def least_bytes(plan: Plan, price: PlanPrice, candidate: Candidate) -> int:
    """Bytes that the fullest rank holds at least at its peak: in the forward that fills it, or when
    the optimizer has all gradients."""
    schedule = plan.schedule
    worst = 0
    for rank in range(max(schedule.stage_rank) + 1):
        memory = [price.memory[s] for s in schedule.stages_of(rank)]
        resident = sum(m.parameters + m.optimizer for m in memory)
        gradients = sum(m.gradients for m in memory)
        kept = _least_activations(plan, candidate, rank, [m.activations for m in memory])
        filled = kept + min(m.unsharded + m.forward - m.activations for m in memory)
        filled = max(filled, _least_gradients(plan, [m.unsharded_gradients for m in memory]))
        if price.resident_gradients:
            filled += gradients
        worst = max(worst, resident + max(filled, gradients))
    return worst


def _least_gradients(plan: Plan, sizes: list[int]) -> int:
    """Bytes of unsharded gradients that live together at least once; ``sizes``: by chunk. Weight
    gradients come unit by unit, so what is reduced once a step is open in all chunks before the
    first reduction; else one chunk's come while the copy of the chunk before is reduced."""
    units = -(-plan.num_microbatches // plan.schedule.unit)
    if plan.reduce_every == "step" and units > 1:
        return sum(sizes)
    return max(sizes) + (min(sizes) if units * len(sizes) > 1 else 0)


def _least_activations(plan: Plan, candidate: Candidate, rank: int, sizes: list[int]) -> int:
    """Bytes of chunk-activations that live together at least once; ``sizes``: by chunk."""
    m, pp, chunks = plan.num_microbatches, plan.layout.pp, plan.layout.chunks
    way_round = 2 * (pp - rank) - 1  # forwards before the first input gradient can be back
    if candidate.schedule in ("1f1b", "zb_h1"):
        return min(m, pp - rank) * sizes[0]
    if candidate.schedule == "interleaved_1f1b":
        return min(m * chunks, way_round - 1 + (chunks - 1) * pp + 1) * min(sizes)
    if candidate.schedule == "zeropp":
        unit = candidate.unit if candidate.cap else min(units_of(SPACES["zeropp"], pp, m))
        last = min(unit, way_round)
        last = min(last, candidate.cap - (chunks - 1) * unit) if candidate.cap else 1
        return unit * sum(sizes[:-1]) + last * sizes[-1]
    return sum(sizes) if candidate.schedule == "fsdp" else min(sizes)
