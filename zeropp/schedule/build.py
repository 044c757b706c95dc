"""The door to schedules: a name and sizes in, a schedule out.

``build`` gives the compute actions of any generator by its name. ``step_programs`` gives whole
ZeroPP programs, gathers, reductions and transfers included: planner, tuner and engine call it, so
all three mean the same step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from zeropp.literals import ReduceEvery, StageStyle
from zeropp.schedule import event_loop, generators, zero_bubble
from zeropp.schedule.action import collector_paused
from zeropp.schedule.passes import lower
from zeropp.schedule.program import Program, Schedule, StageCost, loop_placement, v_placement
from zeropp.schedule.zeropp_order import OrderSizes, candidates, default_cap, default_unit

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


@dataclass(frozen=True, kw_only=True)
class StepSizes(OrderSizes):
    """What sets the whole programs of a ZeroPP step, durations aside: the order's sizes, and what
    ``lower`` is told."""

    gather: bool
    prefetch: int = 1
    keep: int = 0
    reduce_every: ReduceEvery = "unit"


@lru_cache(maxsize=128)
def step_programs(
    sizes: StepSizes, costs: tuple[StageCost, ...] | None = None
) -> tuple[Schedule, ...]:
    """Whole programs to choose from: the order for equal durations, and with ``costs`` (one per
    stage) one that is planned with them, where it differs.

    Cached, because many plans that differ in other degrees share them. Raises ValueError where the
    activation cap is too small.
    """
    return tuple(
        lower(
            order,
            gather=sizes.gather,
            prefetch=sizes.prefetch,
            keep=sizes.keep,
            reduce_every=sizes.reduce_every,
        )
        for order in candidates(sizes, costs)
    )


@collector_paused()
def build(
    name: str,
    *,
    num_ranks: int,
    chunks: int,
    num_microbatches: int,
    group: int | None = None,
    unit: int | None = None,
    activation_cap: int | None = None,
    stage_style: StageStyle = "loop",
    split_backward: bool = True,
    costs: Sequence[StageCost] | None = None,
) -> Schedule:
    """The compute actions of one optimizer step.

    ``group`` (default: P) is how many microbatches the interleaved schedules send through a chunk
    before they go on to the next. The others concern ZeroPP alone: ``unit`` (default: P, at most
    m), ``activation_cap`` (live chunk-activations per rank, default ``unit * chunks``; on a V half
    of 1F1B's), ``stage_style``, ``split_backward`` and ``costs`` (durations, one per stage;
    default: all equal). Raises ValueError where the generator has no order for these sizes.
    """
    if name not in GENERATORS:
        raise ValueError(f"schedule={name!r}: no such generator (known: {', '.join(GENERATORS)})")
    if chunks > 1 and name in ("gpipe", "1f1b", "zb_h1"):
        raise ValueError(f"chunks={chunks}: {name} has one chunk per rank")
    if chunks != 2 and name == "zbv":
        raise ValueError(f"chunks={chunks}: zbv has two chunks per rank")
    m = num_microbatches
    if name != "zeropp":
        placement = v_placement(num_ranks) if name == "zbv" else loop_placement(num_ranks, chunks)
        return Schedule(
            name, m, m, placement, _programs(name, num_ranks, chunks, m, group or num_ranks)
        )
    unit = min(unit or default_unit(stage_style, num_ranks, m), m)
    sizes = OrderSizes(
        num_ranks=num_ranks,
        chunks=chunks,
        num_microbatches=m,
        unit=unit,
        activation_cap=activation_cap or default_cap(stage_style, num_ranks, chunks, unit),
        stage_style=stage_style,
        split_backward=split_backward,
    )
    return _cheapest(candidates(sizes, costs), costs)


def _cheapest(orders: Sequence[Schedule], costs: Sequence[StageCost] | None) -> Schedule:
    """The order that the event loop prices lowest on these costs, gathers and reductions included;
    the first of equals, which is the order for equal durations."""
    if len(orders) == 1 or costs is None:
        return orders[0]
    gather = any(cost.unshard for cost in costs)
    return min(orders, key=lambda order: event_loop.run(lower(order, gather=gather), costs).step_s)


def _programs(name: str, num_ranks: int, chunks: int, m: int, group: int) -> tuple[Program, ...]:
    if name == "1f1b":
        return generators.one_f_one_b(num_ranks, m)
    if name == "interleaved_1f1b":
        return generators.interleaved_1f1b(num_ranks, chunks, m, group)
    if name == "zb_h1":
        return zero_bubble.zb_h1(num_ranks, m)
    if name == "interleaved_zb":
        return zero_bubble.interleaved_zb(num_ranks, chunks, m, group)
    if name == "zbv":
        return zero_bubble.zbv(num_ranks, m)
    return generators.looped_bfs(num_ranks, chunks, m)
