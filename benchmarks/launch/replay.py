"""Replays points: runs the contender's own code for every rank of one pipeline, each alone on an
emulated device with fake tensors, and puts what they issue on one clock.

The records have provenance ``replayed``: a step time, of which every kernel, collective and message
has the simulator's price, while which there are and in what order the code itself has said.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.launch.attempt import OK, Ending, close_abandoned, new_header, write_unstarted
from benchmarks.launch.options import ReplayOptions
from benchmarks.launch.points import Point
from benchmarks.launch.running import SweepProgress, one_by_one, say
from benchmarks.launch.simulate import MOST_SPANS
from benchmarks.records.record import RunRecord
from benchmarks.specification.contenders import CONTENDERS
from benchmarks.specification.run_spec import check_priced
from zeropp.price.cluster import Cluster
from zeropp.price.price import work_of
from zeropp.price.simulator import simulate
from zeropp.schedule.plan import Plan

if TYPE_CHECKING:
    from zeropp.emulate.clock import Replay
    from zeropp.emulate.trace import Trace
    from zeropp.types.training import OptimizerConfig


def check(points: Sequence[Point], options: ReplayOptions) -> None:
    """Raise SpecError for points that have no price."""
    del options
    for point in points:
        check_priced(point.spec.cluster, point.spec.precision)
    if any(point.plan is not None and point.plan.compile for point in points):
        say("launcher=replay runs no torch.compile: each operator of a block is one kernel")


def settle(runs_dir: Path) -> dict[str, str]:
    """Record the attempts whose launcher is dead. No point is under way: the folder is locked, and
    what others measure is no replay."""
    close_abandoned(runs_dir)
    return {}


def launch(
    points: Sequence[Point], options: ReplayOptions, runs_dir: Path, progress: SweepProgress
) -> list[RunRecord]:
    """Replay every point and write its record."""

    def run(point: Point) -> RunRecord:
        assert point.plan is not None  # infeasible points never reach a launcher
        return _replay(point, point.plan, runs_dir, progress)

    return one_by_one(points, options.kind, progress, run)


def _replay(point: Point, plan: Plan, runs_dir: Path, progress: SweepProgress) -> RunRecord:
    spec, header, ending = point.spec, new_header("replay", plan), OK
    step_s: list[float] = []
    rows: list[list[Any]] = []
    predicted: dict[str, Any] = {}

    def tell(done: int) -> None:
        progress.update(point, f"traced {done} of {plan.layout.pp} ranks")

    try:
        traces = trace_plan(plan, spec.optimizer, tell)
        replayed = replayed_plan(plan, spec.cluster, traces)
    except Exception as error:  # an error in the contender's code is the point's result
        ending = Ending("failed", f"{type(error).__name__}: {str(error).strip()[:500]}")
    else:
        step_s, rows = [replayed.step_s], replayed.timeline.to_rows()
        predicted = {
            "described_step_s": simulate(plan, spec.cluster).step_s,
            "peak_bytes": max(trace.memory.total for trace in traces),
            "memory": [asdict(trace.memory) for trace in traces],
            "busy_s": list(replayed.busy_s.values()),
            "waits_s": list(replayed.waits_s.values()),
            "trace_s": [trace.seconds for trace in traces],
        }
    return write_unstarted(
        spec,
        runs_dir,
        header,
        ending,
        step_s=step_s,
        spans=rows if len(rows) <= MOST_SPANS else [],
        predicted=predicted,
    )


def trace_plan(
    plan: Plan, optimizer: OptimizerConfig, tell: Callable[[int], None] = lambda _: None
) -> list[Trace]:
    """Trace the ranks of a plan's first pipeline, without ``torch.compile``, which needs values;
    ``tell`` is called with how many are traced."""
    from zeropp.emulate.trace import trace_ranks

    plan = replace(plan, compile=False)
    traces: list[Trace] = []
    program, ranks = CONTENDERS[plan.contender], plan.layout.pipeline(0)
    tell(0)
    for trace in trace_ranks(plan, ranks, optimizer=optimizer, program=program, steps=2):
        traces.append(trace)
        tell(len(traces))
    return traces


def replayed_plan(plan: Plan, cluster: Cluster, traces: Sequence[Trace]) -> Replay:
    """The second step of a plan on a cluster, from the traces of the ranks of its first pipeline,
    with the simulator's kernels of the plan's program."""
    from zeropp.emulate.clock import kernel_s, replay

    work = work_of(plan, cluster)
    return replay(
        {trace.rank: trace.log for trace in traces},
        cluster,
        plan.layout.world,
        kernel_prices=partial(kernel_s, work.device),
        launch_s=work.launch_s,
        title=f"{plan.shape.name} {plan.contender} {plan.layout.world} GPUs",
    )
