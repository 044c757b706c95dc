"""A lower bound of a plan's memory for every order of actions that the contenders' planners make,
with which the tuner drops plans that cannot fit. Tests compare it with the simulator.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from zeropp.cost import StepBytes
from zeropp.plan import SizedPlan
from zeropp.schedule.action import Op
from zeropp.schedule.program import Schedule


def least_bytes(plan: SizedPlan, held: StepBytes) -> int:
    """The least peak of the fullest rank in bytes: in the forward that fills its memory, or when
    the optimizer has all gradients."""
    worst = 0
    for rank in range(plan.schedule.num_ranks):
        memory = [held.memory[s] for s in plan.schedule.stages_of(rank)]
        resident = sum(m.parameters + m.optimizer + m.buffers for m in memory)
        gradients = sum(m.gradients for m in memory)
        kept = _kept_bytes(plan, held, rank)
        unreduced = [m.unsharded_gradients for m in memory]
        if _unreduced_beside(plan):
            later = plan.schedule.unit * sum(m.activations for m in memory[:-1])
            kept = max(kept, later + memory[-1].activations + sum(unreduced))
        filled = kept + _forward_bytes(plan, held, rank)
        filled = max(filled, _least_gradients(plan, unreduced))
        if held.resident_gradients:
            filled += gradients
        worst = max(worst, resident + max(filled, gradients))
    return worst


def least_of_family(first: SizedPlan, held: StepBytes) -> int:
    """The least bytes of every member of a family, of which ``first`` has the smallest unit. What
    may be less in other members is left out: gradients that wait for their reduction, and all but
    one of the activations of a rank's last chunk, of which a cap that was asked for leaves room for
    fewer where units are larger."""
    memory = tuple(replace(of, unsharded_gradients=0) for of in held.memory)
    return least_bytes(replace(first, activation_cap=0), replace(held, memory=memory))


def least_of_alike(first: SizedPlan, held: StepBytes) -> int:
    """The least bytes of every plan that differs from ``first`` in how data-parallel ranks are used
    (and, as above, in unit and cap): those of activations, temporaries and messages alone."""
    none = {"parameters": 0, "optimizer": 0, "gradients": 0, "unsharded": 0}
    memory = tuple(replace(of, **none) for of in held.memory)
    return least_of_family(first, replace(held, memory=memory))


def _kept_bytes(plan: SizedPlan, held: StepBytes, rank: int) -> int:
    """The least bytes of activations before a rank's first backward. Torch's pipelining has a
    permanent buffer for every message of a step, in which the inputs of stages are kept."""
    ranks, stages = plan.schedule.stage_rank, plan.schedule.stages_of(rank)
    memory = [held.memory[s] for s in stages]
    if not held.torch_runtime:
        return _least_activations(plan, rank, [m.activations for m in memory])
    neighbours = [other for s in stages for other in (s - 1, s + 1) if 0 <= other < len(ranks)]
    messages = sum(ranks[other] != rank for other in neighbours) * plan.num_microbatches
    sizes = [m.activations - m.boundary * (s > 0) for s, m in zip(stages, memory, strict=True)]
    return messages * memory[0].boundary + _least_activations(plan, rank, sizes)


def _forward_bytes(plan: SizedPlan, held: StepBytes, rank: int) -> int:
    """The least bytes in addition to kept activations in the forward that fills a rank's memory:
    temporaries and gathered parameters. Torch's pipelining keeps its 16-bit copies of all chunks if
    there is nothing to gather."""
    stages = plan.schedule.stages_of(rank)
    memory = [held.memory[s] for s in stages]
    if not held.torch_runtime or plan.layout.shard > 1:
        return min(m.unsharded + m.forward - m.activations for m in memory)
    shared = {0, plan.schedule.num_stages - 1} if held.shared_ends else set()
    copies = sum(m.unsharded for s, m in zip(stages, memory, strict=True) if s not in shared)
    copies += held.memory[0].unsharded if shared else 0
    return copies + min(m.forward - m.activations for m in memory)


def _least_gradients(plan: SizedPlan, sizes: list[int]) -> int:
    """The bytes of unsharded gradients that are held together at least once; ``sizes`` are per
    chunk. Weight gradients come unit by unit. So gradients that are reduced once per step exist in
    all chunks before the first reduction; otherwise those of one chunk come while the copy of the
    chunk before is reduced. A rank with one chunk has freed the copy by then, as it has only one
    buffer."""
    if plan.reduce_every == "step" and plan.num_units > 1:
        return sum(sizes)
    return max(sizes) + (min(sizes) if len(sizes) > 1 else 0)


def _unreduced_beside(plan: SizedPlan) -> bool:
    """Whether the gradients of all chunks exist, unreduced, when a whole unit but the first has its
    first microbatch in the last chunk of a rank, and all others in the chunks before.

    This is so on a loop where gradients are reduced once per step, if the cap leaves room for less
    than a unit beside these activations: then the units before have made weight gradients of all
    chunks."""
    schedule, unit = plan.schedule, plan.schedule.unit
    if schedule.name != "zeropp" or plan.stage_style != "loop" or plan.reduce_every != "step":
        return False
    needed = unit * (plan.layout.chunks - 1) + 1
    return 0 < plan.activation_cap < needed + unit and plan.num_microbatches >= 2 * unit


def _least_activations(plan: SizedPlan, rank: int, sizes: list[int]) -> int:
    """The bytes of chunk-activations that are held together at least once; ``sizes`` are per
    chunk. They are those of the forwards that a rank makes before its first backward."""
    name, m, pp = plan.schedule.name, plan.num_microbatches, plan.layout.pp
    way_round = 2 * (pp - rank) - 1  # forwards before the first input gradient can arrive
    if name in ("1f1b", "zb_h1"):
        return min(m, pp - rank) * sizes[0]
    if name == "interleaved_1f1b":
        return _in_groups(min(pp, m), way_round, m, sizes)
    if name == "interleaved_zb":
        return _in_groups(min(pp, m), pp - rank, m, sizes)
    if name == "looped_bfs":
        return m * sum(sizes)
    if name in ("zbv", "dualpipev"):
        return min(m, 2 * pp - rank - 1) * sizes[0] + min(m, rank + 1) * sizes[1]
    if name == "zeropp" and plan.stage_style == "loop":
        unit, cap = plan.schedule.unit, plan.activation_cap
        last = min(unit, way_round, cap - (len(sizes) - 1) * unit if cap else 1)
        return unit * sum(sizes[:-1]) + last * sizes[-1]
    return sum(sizes) if name == "accumulation" else min(sizes)


def _in_groups(group: int, last: int, m: int, sizes: list[int]) -> int:
    """The least bytes of the forwards of ``group`` or more microbatches in every chunk but the
    last, and of ``last`` forwards after them, as far as a step of ``m`` microbatches has so many:
    up to ``group`` are in the last chunk, and the others may be in any."""
    others = min(last - group, (m - group) * len(sizes)) if last > group else 0
    return group * sum(sizes[:-1]) + min(last, group) * sizes[-1] + others * min(sizes)


def exceeds(compute: Schedule, plan: SizedPlan, held: StepBytes, limit_bytes: int) -> bool:
    """Whether the first or the last rank, as a rule the fullest, certainly holds more than
    ``limit_bytes`` at a time if they have their compute actions in the order of ``compute``, which
    has no other actions."""
    for rank in {0, compute.num_ranks - 1}:
        mine = [held.memory[s] for s in compute.stages_of(rank)]
        resident = sum(of.parameters + of.optimizer + of.buffers for of in mine)
        resident += held.resident_gradients * sum(of.gradients for of in mine)
        room = limit_bytes - resident
        if any(now > room for now in _moments(compute, plan, held, rank)):
            return True
    return False


def _moments(compute: Schedule, plan: SizedPlan, held: StepBytes, rank: int) -> Iterator[int]:
    """The bytes that a rank holds at least, action by action, in addition to what is always held:
    activations, the parameters of the stage in use, and gradients from a stage's first weight
    gradient to the reduction after its last one."""
    memory, m = held.memory, plan.num_microbatches
    span = plan.schedule.unit if plan.reduce_every == "unit" else m
    left: dict[tuple[int, int], int] = {}  # weight gradients to come before a reduction
    now = 0
    for stage, op, microbatch in compute.programs[rank]:
        of, number = memory[stage], microbatch or 0
        if op is Op.FORWARD:
            now += of.activations
            yield now + of.unsharded + of.forward - of.activations
            continue
        if op is not Op.BACKWARD_WEIGHT:
            yield now + of.unsharded
            now -= of.activations - of.deferred
        if op is not Op.BACKWARD_INPUT:
            part = (stage, number // span)
            if part not in left:
                left[part] = min(span, m - part[1] * span)
                now += of.unsharded_gradients
                yield now
            now -= of.deferred
            left[part] -= 1
            if not left[part]:
                now -= of.unsharded_gradients
