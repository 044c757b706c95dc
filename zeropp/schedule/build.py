"""The one door to the generators: a name and sizes in, a compute-only Schedule out."""

from __future__ import annotations

from collections.abc import Sequence

from zeropp.schedule import event_loop, generators, zero_bubble
from zeropp.schedule.action import collector_paused
from zeropp.schedule.passes import lower
from zeropp.schedule.program import Program, Schedule, StageCost, loop_placement, v_placement
from zeropp.schedule.zeropp_order import candidates

GENERATORS = (
    "gpipe",
    "1f1b",
    "interleaved_1f1b",
    "looped_bfs",
    "zb_h1",
    "interleaved_zb",
    "zbv",
    "zeropp",
)


@collector_paused()
def build(
    name: str,
    *,
    num_ranks: int,
    chunks: int,
    num_microbatches: int,
    unit: int | None = None,
    activation_cap: int | None = None,
    costs: Sequence[StageCost] | None = None,
) -> Schedule:
    """A compute-only schedule of one optimizer step.

    ``unit`` (default: P, at most m), ``activation_cap`` (live chunk-activations a rank, default
    ``unit * chunks``) and ``costs`` (one a stage; default: equal) concern ZeroPP alone. Raises
    ValueError where the generator has no order for these sizes.
    """
    if name not in GENERATORS:
        raise ValueError(f"schedule={name!r}: no such generator (known: {', '.join(GENERATORS)})")
    if chunks > 1 and name in ("gpipe", "1f1b", "zb_h1"):
        raise ValueError(f"chunks={chunks}: {name} has one chunk a rank")
    if chunks != 2 and name == "zbv":
        raise ValueError(f"chunks={chunks}: zbv has two chunks a rank")
    m = num_microbatches
    unit = min(unit or num_ranks, m)
    if name == "zeropp":
        cap = activation_cap or unit * chunks
        return _cheapest(candidates(num_ranks, chunks, m, unit, cap, costs), costs)
    return Schedule(
        name=name,
        num_microbatches=m,
        unit=m,
        stage_rank=v_placement(num_ranks) if name == "zbv" else loop_placement(num_ranks, chunks),
        programs=_programs(name, num_ranks, chunks, m),
    )


def _cheapest(orders: Sequence[Schedule], costs: Sequence[StageCost] | None) -> Schedule:
    """The order that the event loop prices lowest on these costs, gathers and reductions included;
    the first of equals, which is the order for equal durations."""
    if len(orders) == 1 or costs is None:
        return orders[0]
    gather = any(cost.unshard for cost in costs)
    return min(orders, key=lambda order: event_loop.run(lower(order, gather=gather), costs).step_s)


def _programs(name: str, num_ranks: int, chunks: int, m: int) -> tuple[Program, ...]:
    if name == "1f1b":
        return generators.one_f_one_b(num_ranks, m)
    if name == "interleaved_1f1b":
        return generators.interleaved_1f1b(num_ranks, chunks, m)
    if name == "zb_h1":
        return zero_bubble.zb_h1(num_ranks, m)
    if name == "interleaved_zb":
        return zero_bubble.interleaved_zb(num_ranks, chunks, m)
    if name == "zbv":
        return zero_bubble.zbv(num_ranks, m)
    return generators.looped_bfs(num_ranks, chunks, m)
