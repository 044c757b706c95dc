"""Replays points: runs the contender's own code for every rank of one pipeline, each alone on an
emulated device with fake tensors, and puts what they issue on one clock.

The records have provenance ``replayed``: a step time in which every kernel, collective and message
has the simulator's price. Which there are, and their order, comes from the code itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.launch.options import LauncherOptions
from benchmarks.launch.points import Point
from benchmarks.launch.running import (
    Sweep,
    SweepProgress,
    check_once,
    check_rank,
    one_by_one,
    say,
    without_ranks,
)
from benchmarks.launch.simulate import MOST_SPANS
from benchmarks.launch.trace import settle as settle
from benchmarks.launch.trace import trace_plan
from benchmarks.records.record import RunRecord
from benchmarks.records.simulated import predicted_memory
from benchmarks.specification.run_spec import check_priced
from zeropp.price.cluster import Cluster
from zeropp.price.price import work_of
from zeropp.price.simulator import simulate
from zeropp.schedule.plan import Plan

if TYPE_CHECKING:
    from zeropp.emulate.clock import Replay
    from zeropp.emulate.trace import Trace
    from zeropp.types.training import OptimizerConfig


def check(points: Sequence[Point], options: LauncherOptions, sweep: Sweep) -> None:
    """Raise SpecError for points that have no price."""
    check_once(options.kind, sweep)
    for point in points:
        check_rank(point, here=False)
        check_priced(point.spec.cluster, point.spec.precision)
    if any(point.plan is not None and point.plan.compile for point in points):
        say("launcher=replay runs no torch.compile: each operator of a block is one kernel")


def launch(
    points: Sequence[Point], options: LauncherOptions, runs_dir: Path, progress: SweepProgress
) -> list[RunRecord]:
    """Replay every point and write its record."""
    return one_by_one(
        points,
        "replay",
        progress,
        lambda point: without_ranks(point, "replay", runs_dir, partial(_replayed, point, progress)),
    )


def _replayed(point: Point, progress: SweepProgress) -> dict[str, Any]:
    """Replay a point; returns what its record has."""
    plan, cluster = point.plan, point.spec.cluster
    assert plan is not None  # infeasible points never reach a launcher

    def tell(done: int) -> None:
        progress.update(point, f"traced {done} of {plan.layout.pp} ranks")

    tell(0)
    traces = trace_pipeline(plan, point.spec.optimizer, tell)
    replayed = replayed_plan(plan, cluster, traces)
    rows = replayed.timeline.to_rows()
    return {
        "step_s": [replayed.step_s],
        "spans": rows if len(rows) <= MOST_SPANS else [],
        "predicted": {
            "described_step_s": simulate(plan, cluster).step_s,
            **predicted_memory([trace.memory for trace in traces]),
            "busy_s": list(replayed.busy_s.values()),
            "waits_s": list(replayed.waits_s.values()),
            "trace_s": [trace.seconds for trace in traces],
        },
    }


def trace_pipeline(
    plan: Plan, optimizer: OptimizerConfig, tell: Callable[[int], None] = lambda _: None
) -> list[Trace]:
    """Trace two steps of the ranks of a plan's first pipeline, without ``torch.compile``, which
    needs values; ``tell`` is called with how many are traced."""
    return trace_plan(
        replace(plan, compile=False), plan.layout.pipeline(0), optimizer, tell, steps=2
    )


def replayed_plan(plan: Plan, cluster: Cluster, traces: Sequence[Trace]) -> Replay:
    """The second step of a plan on a cluster, from the traces of the ranks of its first pipeline,
    with the simulator's kernels of the plan's program."""
    from zeropp.emulate.clock import kernel_s, replay

    work = work_of(plan, cluster)
    return replay(
        {trace.rank: trace.log for trace in traces},
        cluster,
        plan.layout.world,
        kernel_prices=partial(kernel_s, work.device, host=cluster.host),
        launch_s=work.launch_s,
        title=f"{plan.shape.name} {plan.contender} {plan.layout.world} GPUs",
    )
