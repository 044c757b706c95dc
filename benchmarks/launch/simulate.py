"""Prices points instead of running them, and writes the simulator's results as records.

The records have provenance ``simulated``: no rank ran, ``step_s`` is one predicted step, and
``predicted`` has all predictions. A plan that does not fit the memory has status ``oom``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from benchmarks.launch.attempt import Ending, new_header, plan_summary, write_unstarted
from benchmarks.launch.options import LauncherOptions
from benchmarks.launch.points import Point
from benchmarks.launch.running import Sweep, SweepProgress, check_once, one_by_one
from benchmarks.records.record import RunRecord
from benchmarks.records.simulated import prediction
from benchmarks.specification.run_spec import check_priced
from zeropp.choose.contender import describe
from zeropp.price import price_plan
from zeropp.price.simulator import simulate

MOST_SPANS = 20_000  # most spans of a timeline that a record keeps


def check(points: Sequence[Point], options: LauncherOptions, sweep: Sweep) -> None:
    """Raise SpecError if a device's peak is not known for the precision."""
    check_once(options.kind, sweep)
    for point in points:
        check_priced(point.spec.cluster, point.spec.precision)


def settle(runs_dir: Path) -> dict[str, str]:
    """Nothing outlives this launcher."""
    return {}


def launch(
    points: Sequence[Point], options: LauncherOptions, runs_dir: Path, progress: SweepProgress
) -> list[RunRecord]:
    """Price every point and write its record."""
    price = partial(_price, runs_dir=runs_dir, progress=progress)
    return one_by_one(points, "simulate", progress, price)


def _price(point: Point, runs_dir: Path, progress: SweepProgress) -> RunRecord:
    assert point.plan is not None  # infeasible points never reach a launcher
    progress.update(point, "simulating")
    spec, header = point.spec, new_header("simulate")
    result = simulate(point.plan, spec.cluster, price=price_plan(point.plan, spec.cluster))
    plan = replace(point.plan, memory=result.memory)
    ending, limit = Ending("ok"), spec.cluster.device.usable_bytes
    if not result.fits(limit):
        of, peak, available = (
            ("the device", result.peak_bytes, float(limit))
            if result.peak_bytes > limit
            else ("its host", max(m.host for m in result.memory), result.price.host_limit)
        )
        words = f"predicted peak {peak / 2**30:.1f} GiB, {of} has {available / 2**30:.1f}"
        ending = Ending("oom", f"{words} for tensors")
    found = {"words": describe(plan), "gap": point.gap}
    rows = result.timeline().to_rows()
    return write_unstarted(
        spec,
        runs_dir,
        replace(header, plan=plan_summary(plan) | found),
        ending,
        step_s=[result.step_s] if ending.status == "ok" else [],
        spans=rows if len(rows) <= MOST_SPANS else [],
        predicted=prediction(result),
    )
