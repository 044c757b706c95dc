"""Prices points instead of running them, and writes the simulator's results as records.

The records have provenance ``simulated``: no rank ran, ``step_s`` is one predicted step, and
``predicted`` has all predictions. A plan that does not fit the memory has status ``oom``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.launch.options import SimulateOptions
from benchmarks.launch.points import (
    Point,
    attempt_directory,
    launcher_record,
    or_unwritten,
    plan_summary,
    write_record,
)
from benchmarks.launch.sweep import SweepProgress
from benchmarks.launch.trace import traced_record, traced_stages
from benchmarks.records.record import RunRecord, Status, now
from benchmarks.specification.run_spec import RunSpec, check_priced
from zeropp.cost import price_plan
from zeropp.plan import Plan
from zeropp.sim.simulator import SimResult, simulate

_SPANS = 20_000  # most spans of a timeline that a record keeps


def check(points: Sequence[Point], options: SimulateOptions) -> None:
    """Raise SpecError if a device's peak is not known for the precision, or if traced compute times
    are asked for and there are none."""
    for point in points:
        check_priced(point.spec.cluster, point.spec.precision)
        if options.compute == "traced" and point.plan is not None:
            traced_record(point.spec, point.plan, Path(options.traced_runs))


def launch(
    points: Sequence[Point], options: SimulateOptions, runs_dir: Path, progress: SweepProgress
) -> list[RunRecord]:
    """Price every point and write its record."""
    records = []
    for point in points:
        progress.update(point, "simulating")
        run = partial(_price, point, options, runs_dir)
        records.append(or_unwritten(point, "simulate", run))
        progress.finished(records[-1])
    return records


def _price(point: Point, options: SimulateOptions, runs_dir: Path) -> RunRecord:
    started = now()
    assert point.plan is not None  # infeasible points never reach a launcher
    source = None
    if options.compute == "traced":
        source = traced_record(point.spec, point.plan, Path(options.traced_runs))
    result = _simulate(point.spec, point.plan, source)
    directory = attempt_directory(point.spec, runs_dir, "simulate")
    record = simulated_record(
        point.spec, point.plan, attempt=directory.name, started_at=started, result=result
    )
    if source is not None:
        predicted = {**record.predicted, "compute_from": source.record_id}
        record = replace(record, variant=options.variant, predicted=predicted)
    write_record(record, directory)
    return record


def _simulate(spec: RunSpec, plan: Plan, traced: RunRecord | None) -> SimResult:
    if traced is None:
        return simulate(plan, spec.cluster)
    price = price_plan(plan, spec.cluster)
    costs = traced_stages(plan, price, traced.predicted["compute_s"])
    return simulate(plan, spec.cluster, price=price, costs=costs)


def simulated_record(
    spec: RunSpec, plan: Plan, *, attempt: str, started_at: str, result: SimResult
) -> RunRecord:
    """The record of a plan that was simulated."""
    limit = spec.cluster.device.usable_bytes
    status: Status = "ok" if result.peak_bytes <= limit else "oom"
    peak, held = result.peak_bytes / 2**30, limit / 2**30
    over = f"predicted peak {peak:.1f} GiB, the device has {held:.1f} for tensors"
    reason = "" if status == "ok" else over
    return launcher_record(
        spec,
        attempt,
        launcher="simulate",
        status=status,
        reason=reason,
        started_at=started_at,
        plan=plan_summary(replace(plan, memory=result.memory)),
        step_s=[result.step_s] if status == "ok" else [],
        spans=_spans(result),
        predicted=prediction(result),
    )


def prediction(result: SimResult) -> dict[str, Any]:
    """The part of a simulated step that a record keeps."""
    return {
        "step_s": result.step_s,
        "tokens_per_s_per_gpu": result.tokens_per_s_per_gpu,
        "bubble": result.bubble,
        "compute_limit_tokens_per_s_per_gpu": result.tokens_per_s_per_gpu / result.limit_share,
        "share_of_compute_limit": result.limit_share,
        "losses_s": result.losses.by_kind(),
        "peak_bytes": result.peak_bytes,
        "memory": [asdict(memory) for memory in result.memory],
    }


def _spans(result: SimResult) -> list[list[Any]]:
    rows = result.timeline().to_rows()
    return rows if len(rows) <= _SPANS else []
