"""Traces points: runs the contender's own code for a few ranks of a job, each without its peers.

The records have provenance ``traced``. With fake tensors they have the exact bytes that the code
allocates, and no times. With real tensors they have the allocator's peaks, the durations of compute
actions, and a profiler trace per rank beside the record. In neither case is there a step time,
because network and waiting for peers are missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.launch.local import close_abandoned
from benchmarks.launch.options import TraceOptions
from benchmarks.launch.points import (
    Point,
    attempt_directory,
    launcher_record,
    or_unwritten,
    plan_summary,
    write_record,
)
from benchmarks.launch.processes import is_here, run_attempt
from benchmarks.launch.sweep_progress import SweepProgress
from benchmarks.records.record import RunRecord, Status, now
from benchmarks.specification.contenders import CONTENDERS
from benchmarks.specification.run_spec import SpecError
from zeropp.plan import Plan


def check(points: Sequence[Point], options: TraceOptions) -> None:
    """Raise SpecError for points that cannot run without peers, and for pipeline ranks that a plan
    does not have."""
    ranks = options.pipeline_ranks
    if not ranks:
        raise SpecError("launcher.pipeline_ranks=[]: must name pipeline ranks (try [0,-1])")
    for point in points:
        (_check_real if options.tensors == "real" else _check_fake)(point)
        pp = point.plan.layout.pp if point.plan is not None else max(map(abs, ranks)) + 1
        for rank in ranks:
            if not -pp <= rank < pp:
                raise SpecError(
                    f"launcher.pipeline_ranks={rank}: {point.spec.spec_id} has {pp} pipeline "
                    f"ranks (try 0 to {pp - 1}, or -1 for the last)"
                )


def _check_fake(point: Point) -> None:
    name = point.spec.contender.name
    if not CONTENDERS[name].takes_fake_tensors:
        able = [other for other, known in CONTENDERS.items() if known.takes_fake_tensors]
        raise SpecError(
            f"contender.name={name!r}: with fake tensors launcher=trace runs "
            f"{', '.join(able)} (use launcher.tensors=real, or launcher=simulate for formulas)"
        )
    if point.plan is not None and point.plan.compile:
        raise SpecError(
            "contender.compile=true: launcher=trace cannot compile with fake tensors (use false, "
            "or launcher.tensors=real)"
        )


def _check_real(point: Point) -> None:
    cluster = point.spec.cluster
    if not is_here(cluster.device):
        raise SpecError(
            f"cluster={cluster.name}: launcher.tensors=real needs that GPU here and none is found "
            "(use launcher.tensors=fake, or cluster=cpu_gloo)"
        )


def launch(
    points: Sequence[Point], options: TraceOptions, runs_dir: Path, progress: SweepProgress
) -> list[RunRecord]:
    """Trace every point: with fake tensors one rank per core at a time, with real ones one rank at
    a time."""
    close_abandoned(runs_dir)
    records = []
    for point in points:
        assert point.plan is not None  # infeasible points never reach a launcher
        pipeline = point.plan.layout.pipeline(0)
        ranks = [
            pipeline[index] for index in sorted({r % len(pipeline) for r in options.pipeline_ranks})
        ]
        if variant := options.variant:
            lone = [[rank] for rank in ranks]
            run = partial(
                run_attempt,
                point,
                launcher="trace",
                worlds=lone,
                runs_dir=runs_dir,
                progress=progress,
                variant=variant,
                arguments=["--lone"],
            )
        else:
            run = partial(
                _trace_fake, point, point.plan, ranks, runs_dir=runs_dir, progress=progress
            )
        records.append(or_unwritten(point, "trace", run))
        progress.finished(records[-1])
    return records


def _trace_fake(
    point: Point, plan: Plan, ranks: Sequence[int], *, runs_dir: Path, progress: SweepProgress
) -> RunRecord:
    spec, started = point.spec, now()
    directory = attempt_directory(spec, runs_dir, "trace")
    status: Status = "ok"
    reason, predicted = "", {}
    try:
        predicted = _trace(point, plan, ranks, progress)
    except Exception as error:  # an error in the contender's code is the point's result
        status, reason = "failed", f"{type(error).__name__}: {str(error).strip()[:500]}"
    record = launcher_record(
        spec,
        directory.name,
        launcher="trace",
        status=status,
        reason=reason,
        started_at=started,
        plan=plan_summary(plan),
        predicted=predicted,
    )
    write_record(record, directory)
    return record


def _trace(
    point: Point, plan: Plan, ranks: Sequence[int], progress: SweepProgress
) -> dict[str, Any]:
    """Trace some ranks with fake tensors; returns the part that a record keeps."""
    from zeropp.engine.traced_ranks import Trace, trace_ranks

    spec = point.spec
    build = CONTENDERS[spec.contender.name].build
    traces: list[Trace] = []
    progress.update(point, f"tracing {len(ranks)} ranks")
    for trace in trace_ranks(plan, ranks, optimizer=spec.optimizer, build=build):
        traces.append(trace)
        progress.update(point, f"traced {len(traces)} of {len(ranks)} ranks")
    return {
        "peak_bytes": max(trace.memory.total for trace in traces),
        "memory": [asdict(trace.memory) for trace in traces],
        "ranks": ranks,
        "trace_s": [trace.seconds for trace in traces],
    }
