"""The compute actions of any schedule by its name, ZeroPP's among them.

``build`` chooses among ZeroPP's orders by the step time in the event loop alone; the planner and
the tuner let the simulator choose, which looks at memory, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from zeropp.schedule import event_loop, generators
from zeropp.schedule.program import (
    Schedule,
    StageCost,
    collector_paused,
    loop_placement,
    v_placement,
)
from zeropp.schedule.zeropp_order import StepSizes, step_drafts, unit_size

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
    group: int | None = None,
    unit: int | None = None,
    activation_cap: int | None = None,
    split_backward: bool = True,
    merged: int = 1,
    costs: Sequence[StageCost] | None = None,
) -> Schedule:
    """The compute actions of one optimizer step.

    ``group`` (default: P) is how many microbatches the interleaved schedules send through a chunk
    before they go on to the next. The others concern ZeroPP alone: ``unit`` (default: P, at most
    m), ``activation_cap`` (live chunk-activations per rank, default ``unit * chunks``),
    ``split_backward``, ``merged`` and ``costs`` (durations, one per stage; default: all equal).
    Raises ValueError where the generator has no order for these sizes.
    """
    if name not in GENERATORS:
        raise ValueError(f"schedule={name!r}: no such generator (known: {', '.join(GENERATORS)})")
    if chunks > 1 and name in ("gpipe", "1f1b", "zb_h1"):
        raise ValueError(f"chunks={chunks}: {name} has one chunk per rank")
    if chunks != 2 and name == "zbv":
        raise ValueError(f"chunks={chunks}: zbv has two chunks per rank")
    m = num_microbatches
    if name != "zeropp":
        group, is_v = group or num_ranks, name == "zbv"
        order = {
            "1f1b": partial(generators.one_f_one_b, num_ranks, m),
            "interleaved_1f1b": partial(generators.interleaved_1f1b, num_ranks, chunks, m, group),
            "zb_h1": partial(generators.zb_h1, num_ranks, m),
            "interleaved_zb": partial(generators.interleaved_zb, num_ranks, chunks, m, group),
            "zbv": partial(generators.zbv, num_ranks, m),
        }.get(name, partial(generators.looped_bfs, num_ranks, chunks, m))
        return Schedule(
            name=name,
            num_microbatches=m,
            unit=m,
            stage_rank=v_placement(num_ranks) if is_v else loop_placement(num_ranks, chunks),
            programs=order(),
        )
    unit = unit_size(unit or "auto", num_ranks, m)
    sizes = StepSizes(
        num_ranks=num_ranks,
        chunks=chunks,
        num_microbatches=m,
        unit=unit,
        activation_cap=activation_cap or unit * chunks,
        split_backward=split_backward,
        merged=merged,
        gather=any(cost.unshard for cost in costs or ()),
    )
    drafts = list(step_drafts(sizes, tuple(costs or ())))
    if len(drafts) > 1:  # of equally fast ones the first, the order for equal durations
        drafts.sort(key=lambda draft: event_loop.run(draft[1](), costs or ()).step_s)
    return drafts[0][0]
