"""How long a step takes at least because its ranks may hold few activations.

An activation is held from the start of its forward, through all later stages and back, to the end
of its weight gradient. The longer this is, and the fewer may be held at a time, the longer is the
step.
"""

from __future__ import annotations

from zeropp.plan import SizedPlan
from zeropp.tune.latency import Latency


def least_by_hold_time_s(plan: SizedPlan, latency: Latency, stages: tuple[int, ...]) -> float:
    """Seconds until the rank that holds ``stages`` can have its last weight gradient, whatever the
    order is, by the plan's activation cap. Without a limit the units do not matter, so that the
    bound of a family, which has none, holds for its members."""
    held = plan.num_microbatches * sum(map(latency.held, stages)) / plan.activation_cap
    least = latency.to[stages[0]] + held
    limited = plan.activation_cap < plan.num_microbatches * len(stages)
    if limited and plan.stage_style == "loop" and len(stages) > 1:
        return max(least, _unit_by_unit_s(plan, latency, stages))
    return least


def _unit_by_unit_s(plan: SizedPlan, latency: Latency, stages: tuple[int, ...]) -> float:
    """The same where units go through the chunks breadth first, and a second unit has no room.

    A unit turns round in the rank's last chunk: all its microbatches are there forwards and
    backwards while all their other activations are held, so that only ``room`` of them are there at
    a time. If the others of two units are too many, the next unit turns only when some of those
    have been freed by their backwards, and when as many of its own forwards have followed.
    """
    unit, others, last = plan.schedule.unit, stages[:-1], stages[-1]
    room = plan.activation_cap - len(others) * unit
    freed = len(others) * unit - (room - 1)  # between two turns
    if freed <= 0:
        return 0.0
    weight, forward, backward = latency.weight[last], latency.forward[last], latency.backward[last]
    turn = max(
        -(-unit // room) * latency.held(last) - weight,
        latency.held(last) - weight + (unit - 1) * (latency.forward[-1] + latency.backward[-1]),
        unit * (forward + backward) + max(0, unit - room) * weight,
    )
    each = min(latency.forward[s] + latency.backward[s] + latency.weight[s] for s in others)
    after = weight + unit * sum(latency.backward[s] + latency.weight[s] for s in others)
    units = plan.num_microbatches // unit  # the whole ones
    turns = units * turn + (units - 1) * (weight + freed * each)
    return latency.to[last] + turns + after if units else 0.0
