"""Points of a sweep: all are planned before the first starts, and those with a record are
skipped."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from benchmarks.launch.auto import with_best_plan
from benchmarks.records.record import RecordError, RunRecord, find_records, read_record
from benchmarks.specification.run_spec import RunSpec
from benchmarks.worker.data import check_data
from zeropp.cost import price_plan
from zeropp.layout import InfeasibleError
from zeropp.plan import Plan
from zeropp.sim.memory import peak_memory
from zeropp.timeline import Provenance

Rerun = Literal["missing", "failed", "all"]


@dataclass(frozen=True)
class Point:
    """A spec with its plan, or with the reason why it has none."""

    spec: RunSpec
    plan: Plan | None
    reason: str = ""  # one line; empty if there is a plan
    note: str = ""  # what the tuner chose, in one line; empty if nothing was open


def plan_point(spec: RunSpec) -> Point:
    """Check a spec's data, let the tuner choose knobs that are ``auto``, and plan it, with the
    memory that the cost model predicts. Raises SpecError on bad input."""
    check_data(spec)
    try:
        spec, note = with_best_plan(spec)
        plan = spec.plan()
    except InfeasibleError as error:
        return Point(spec, None, str(error))
    memory = peak_memory(plan, price_plan(plan, spec.cluster))
    return Point(spec, replace(plan, memory=memory), note=note)


def still_to_run(
    points: Iterable[Point], runs_dir: Path, *, provenance: Provenance, variant: str, rerun: Rerun
) -> list[Point]:
    """The points to run: those that no record of this provenance and variant has settled.

    A point is settled by a success, and by a failure of its own (out of memory, an error), but not
    by an attempt that was interrupted from outside. ``rerun=failed`` also returns points without a
    success, ``rerun=all`` returns every point.
    """
    if rerun == "all":
        return list(points)
    found = []
    for point in points:
        mine = [
            record
            for record in records_of(point.spec, runs_dir)
            if (record.provenance, record.variant) == (provenance, variant)
        ]
        has_success = any(record.status == "ok" for record in mine)
        has_failed = rerun == "missing" and any(not record.interrupted for record in mine)
        if not has_success and not has_failed:
            found.append(point)
    return found


def records_of(spec: RunSpec, runs_dir: Path) -> Iterator[RunRecord]:
    """The readable records of a spec, oldest first; ``benchmarks.status`` lists unreadable ones."""
    for path in find_records([runs_dir / spec.spec_id]):
        try:
            yield read_record(path)
        except RecordError:
            continue
