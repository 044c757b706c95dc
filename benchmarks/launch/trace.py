"""Trace points: the engine's own code of a few ranks of a job, each alone, with fake tensors.

A record of this launcher has provenance ``traced``: its memory is what the engine allocates, byte
by byte; it has no step time, because nothing was computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.environment import git_state
from benchmarks.launch.points import (
    PROVENANCE,
    Point,
    attempt_directory,
    now,
    plan_summary,
)
from benchmarks.progress import SweepProgress
from benchmarks.record import SCHEMA_VERSION, RunRecord
from benchmarks.spec import SpecError


def check(points: Sequence[Point], options: dict[str, Any]) -> None:
    """Refuse contenders whose code does not run under fake tensors."""
    del options
    for point in points:
        if point.spec.contender.name != "zeropp":
            raise SpecError(
                f"contender.name={point.spec.contender.name!r}: launcher=trace runs zeropp alone "
                "(use launcher=simulate for its formulas, launcher=local to measure)"
            )


def launch(
    points: Sequence[Point], options: dict[str, Any], runs_dir: Path, progress: SweepProgress
) -> list[RunRecord]:
    """Trace every point, one pipeline rank after another."""
    records = []
    for point in points:
        records.append(_trace_point(point, options["pipeline_ranks"], runs_dir, progress))
        progress.finished(records[-1])
    return records


def _trace_point(
    point: Point, pipeline_ranks: Sequence[int], runs_dir: Path, progress: SweepProgress
) -> RunRecord:
    from zeropp.engine.trace import trace_rank  # torch, which planning does without

    assert point.plan is not None  # infeasible points never reach a launcher
    spec, plan, started = point.spec, point.plan, now()
    directory = attempt_directory(spec, runs_dir, "trace")
    pipeline = plan.layout.pipeline(0)
    traces = []
    for index in sorted({index % plan.layout.pp for index in pipeline_ranks}):
        progress.update(point, f"tracing pipeline rank {index}")
        traces.append(trace_rank(plan, pipeline[index], spec.optimizer))
    sha, dirty = git_state()
    record = RunRecord(
        schema_version=SCHEMA_VERSION,
        record_id=f"{spec.spec_id}/{directory.name}",
        spec_id=spec.spec_id,
        spec=spec.to_dict(),
        provenance=PROVENANCE["trace"],
        status="ok",
        reason="",
        started_at=started,
        ended_at=now(),
        git_sha=sha,
        git_dirty=dirty,
        launcher="trace",
        plan=plan_summary(plan),
        predicted={
            "peak_bytes": max(trace.memory.total for trace in traces),
            "memory": [asdict(trace.memory) for trace in traces],
            "ranks": [trace.rank for trace in traces],
            "trace_s": [trace.seconds for trace in traces],
        },
    )
    record.write(directory / "record.json")
    return record
