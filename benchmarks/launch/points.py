"""Points of a sweep: all are planned before the first starts, and those with a record are
skipped."""

from __future__ import annotations

import errno
import itertools
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from benchmarks.launch.auto import with_best_plan
from benchmarks.launch.owner import claim, release
from benchmarks.records.environment import read_code
from benchmarks.records.record import (
    SCHEMA_VERSION,
    RecordError,
    RunRecord,
    Status,
    find_records,
    now,
    read_record,
    write_atomically,
)
from benchmarks.specification.run_spec import RunSpec
from benchmarks.worker.data import check_data
from zeropp.cost import price_plan
from zeropp.layout import InfeasibleError
from zeropp.plan import Plan
from zeropp.sim.memory import peak_memory
from zeropp.timeline import Provenance

Rerun = Literal["missing", "failed", "all"]

PROVENANCE: dict[str, Provenance] = {
    "local": "measured",
    "slurm": "measured",
    "trace": "traced",
    "simulate": "simulated",
}


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
    return [
        point
        for point in points
        if rerun == "all"
        or not _is_settled(_attempts(point.spec, runs_dir, provenance, variant), rerun)
    ]


def _attempts(
    spec: RunSpec, runs_dir: Path, provenance: Provenance, variant: str
) -> list[RunRecord]:
    asked = provenance, variant
    return [r for r in records_of(spec, runs_dir) if (r.provenance, r.variant) == asked]


def _is_settled(records: list[RunRecord], rerun: Rerun) -> bool:
    if any(record.status == "ok" for record in records):
        return True
    return rerun == "missing" and any(not record.interrupted for record in records)


def records_of(spec: RunSpec, runs_dir: Path) -> Iterator[RunRecord]:
    """The readable records of a spec, oldest first; ``benchmarks.status`` lists unreadable ones."""
    for path in find_records([runs_dir / spec.spec_id]):
        try:
            yield read_record(path)
        except RecordError:
            continue


def attempt_directory(spec: RunSpec, runs_dir: Path, launcher: str) -> Path:
    """Make a folder for one attempt, named by launcher and time, which this process owns.

    It gets its name only after its owner was written, so that no other process takes it for
    abandoned.
    """
    point = runs_dir / spec.spec_id
    point.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=".new-", dir=point))
    fresh.chmod(0o755)  # mkdtemp closes folders to others, but others may ask for the status
    claim(fresh)
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S")
    for number in itertools.count(1):
        path = point / f"{launcher}-{stamp}{f'-{number}' if number > 1 else ''}"
        if path.exists():
            continue
        try:
            return fresh.rename(path)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
    raise AssertionError("count() has no end")


def freeze(point: Point, directory: Path, launcher: str, variant: str = "") -> None:
    """Write the files that ranks and the end of the attempt read: the spec, and a header with the
    plan, launcher and code."""
    code = read_code()
    header = {
        "launcher": launcher,
        "provenance": PROVENANCE[launcher],
        "variant": variant,
        "started_at": now(),
        "git_sha": code.sha,
        "git_dirty": code.dirty,
        "code_digest": code.digest,
        "plan": plan_summary(point.plan) if point.plan else {},
    }
    write_atomically(directory / "spec.json", json.dumps(point.spec.to_dict(), indent=1))
    write_atomically(directory / "attempt.json", json.dumps(header, indent=1))


def write_unstarted(
    point: Point,
    runs_dir: Path,
    *,
    launcher: str,
    status: Status,
    reason: str,
    variant: str = "",
    interrupted: bool = False,
) -> RunRecord:
    """Write the record of a point for which no rank was started."""
    directory = attempt_directory(point.spec, runs_dir, launcher)
    record = launcher_record(
        point.spec,
        directory.name,
        launcher=launcher,
        status=status,
        reason=reason,
        started_at=now(),
        variant=variant,
        interrupted=interrupted,
    )
    write_record(record, directory)
    return record


def write_record(record: RunRecord, directory: Path) -> None:
    """Write the record of an attempt that this process owns, and give up the ownership."""
    record.write(directory / "record.json")
    release(directory)


def or_unwritten(point: Point, launcher: str, run: Callable[[], RunRecord]) -> RunRecord:
    """The record that ``run`` returns, or ``unwritten_record`` if files cannot be written."""
    try:
        return run()
    except OSError as error:
        return unwritten_record(point, launcher, error)


def unwritten_record(point: Point, launcher: str, error: OSError) -> RunRecord:
    """A record that could not be written and says why (full disk, read-only folder). The sweep goes
    on, and the point counts as missing."""
    reason = f"not recorded: {error.filename or 'a file'}: {error.strerror or error}"
    attempt = f"{launcher}-unwritten"
    more: dict[str, Any] = {"interrupted": True}
    return launcher_record(
        point.spec,
        attempt,
        launcher=launcher,
        status="failed",
        reason=reason,
        started_at=now(),
        **more,
    )


def launcher_record(
    spec: RunSpec,
    attempt: str,
    *,
    launcher: str,
    status: Status,
    reason: str,
    started_at: str,
    **more: Any,
) -> RunRecord:
    """The record of an attempt that had no ranks and ends now; ``more`` are fields of RunRecord."""
    code = read_code()
    return RunRecord(
        schema_version=SCHEMA_VERSION,
        record_id=f"{spec.spec_id}/{attempt}",
        spec_id=spec.spec_id,
        spec=spec.to_dict(),
        provenance=PROVENANCE[launcher],
        status=status,
        reason=reason,
        started_at=started_at,
        ended_at=now(),
        git_sha=code.sha,
        git_dirty=code.dirty,
        code_digest=code.digest,
        launcher=launcher,
        **more,
    )


def plan_summary(plan: Plan) -> dict[str, Any]:
    """The part of a plan that a record keeps."""
    return {
        "layout": asdict(plan.layout),
        "cuts": list(plan.cuts),
        "schedule": plan.schedule.name,
        "num_microbatches": plan.num_microbatches,
        "unit": plan.schedule.unit,
        "recompute": plan.recompute,
        "recomputed": list(plan.recomputed),
        "reduce_every": plan.reduce_every,
        "predicted_memory": [asdict(memory) for memory in plan.memory],
    }
