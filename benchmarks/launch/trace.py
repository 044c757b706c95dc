"""Traces points: runs the contender's own code for a few ranks of a job, each without its peers.

The records have provenance ``traced`` and the exact bytes that the code allocates, with fake
tensors. They have no times, because kernels, network and waiting for peers are missing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.launch.attempt import close_abandoned
from benchmarks.launch.options import TraceOptions
from benchmarks.launch.points import Point
from benchmarks.launch.running import (
    Sweep,
    SweepProgress,
    check_once,
    check_rank,
    one_by_one,
    without_ranks,
)
from benchmarks.records.record import RunRecord
from benchmarks.records.simulated import predicted_memory
from benchmarks.specification import SpecError
from benchmarks.specification.contenders import CONTENDERS
from zeropp.schedule.plan import Plan

if TYPE_CHECKING:
    from zeropp.emulate.trace import Trace
    from zeropp.types.training import OptimizerConfig


def check(points: Sequence[Point], options: TraceOptions, sweep: Sweep) -> None:
    """Raise SpecError for points that cannot run without peers, and for pipeline ranks that a plan
    does not have."""
    ranks = options.pipeline_ranks
    if not ranks:
        raise SpecError("launcher.pipeline_ranks=[]: must name pipeline ranks (try [0,-1])")
    check_once(options.kind, sweep)
    for point in points:
        check_rank(point)
        if point.plan is not None and point.plan.compile:
            raise SpecError(
                "contender.compile=true: launcher=trace cannot compile with fake tensors (use "
                "false)"
            )
        pp = point.plan.layout.pp if point.plan is not None else max(map(abs, ranks)) + 1
        for rank in ranks:
            if not -pp <= rank < pp:
                raise SpecError(
                    f"launcher.pipeline_ranks={rank}: {point.spec.spec_id} has {pp} pipeline "
                    f"ranks (try 0 to {pp - 1}, or -1 for the last)"
                )


def settle(runs_dir: Path) -> dict[str, str]:
    """Record the attempts whose launcher is dead. No point is under way: the folder is locked, and
    what others measure is no trace."""
    close_abandoned(runs_dir)
    return {}


def launch(
    points: Sequence[Point], options: TraceOptions, runs_dir: Path, progress: SweepProgress
) -> list[RunRecord]:
    """Trace every point, one rank per core at a time."""
    return one_by_one(
        points,
        "trace",
        progress,
        lambda point: without_ranks(
            point, "trace", runs_dir, partial(_traced, point, options, progress)
        ),
    )


def _traced(point: Point, options: TraceOptions, progress: SweepProgress) -> dict[str, Any]:
    """Trace the chosen ranks; returns what their record has."""
    assert point.plan is not None  # infeasible points never reach a launcher
    pipeline = point.plan.layout.pipeline(0)
    chosen = sorted({rank % len(pipeline) for rank in options.pipeline_ranks})
    ranks = [pipeline[index] for index in chosen]

    def tell(done: int) -> None:
        progress.update(point, f"traced {done} of {len(ranks)} ranks")

    progress.update(point, f"tracing {len(ranks)} ranks")
    traces = trace_plan(point.plan, ranks, point.spec.optimizer, tell)
    memory = predicted_memory([trace.memory for trace in traces])
    return {"predicted": memory | {"ranks": ranks, "trace_s": [t.seconds for t in traces]}}


def trace_plan(
    plan: Plan,
    ranks: Sequence[int],
    optimizer: OptimizerConfig,
    tell: Callable[[int], None] = lambda _: None,
    *,
    steps: int = 1,
) -> list[Trace]:
    """Trace some ranks of a plan with fake tensors; ``tell`` is called with how many are traced."""
    from zeropp.emulate.trace import trace_ranks

    program = CONTENDERS[plan.contender]
    traces: list[Trace] = []
    for trace in trace_ranks(plan, ranks, optimizer=optimizer, program=program, steps=steps):
        traces.append(trace)
        tell(len(traces))
    return traces
