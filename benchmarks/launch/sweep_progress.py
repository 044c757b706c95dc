"""What a person sees while a sweep runs: one line per point, and the point's state meanwhile.

Outcomes are never folded here, so that a log has one line per point; a terminal may fold a long
reason by itself.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from types import TracebackType

from benchmarks.launch.points import Point
from benchmarks.records.metrics import peak_memory_gib
from benchmarks.records.record import RunRecord
from benchmarks.specification import progress


def announce(points: Sequence[Point], todo: Sequence[Point], launcher: str) -> None:
    """Print how many points will run, and how many are skipped because they have a record."""
    skipped = len(points) - len(todo)
    done = f", {skipped} already recorded (rerun=all runs them again)" if skipped else ""
    line = f"{len(todo)} of {len(points)} points to run with launcher={launcher}{done}"
    for point in points:
        if point.note:
            progress.CONSOLE.print(point.note, soft_wrap=True, markup=False, highlight=False)
    progress.CONSOLE.print(line, soft_wrap=True)
    for point in todo:
        if point.plan is None:
            _say("infeasible", point.spec.spec_id, point.reason)


def say(line: str) -> None:
    """Print one line, which only a terminal wraps."""
    progress.CONSOLE.print(line, markup=False, soft_wrap=True)


class SweepProgress:
    """A progress bar over the points of a sweep, or lines if the output is no terminal."""

    def __init__(self, total: int) -> None:
        self._bar = progress.progress_line()
        self._task = self._bar.add_task("starting", total=total)

    def __enter__(self) -> SweepProgress:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def update(self, point: Point, state: str) -> None:
        """Show the state of a running point."""
        without_hash = point.spec.spec_id.rpartition("-")[0]
        self._bar.update(self._task, description=f"{without_hash}: {state}")

    def finished(self, record: RunRecord) -> None:
        """Print the outcome of a point and advance the bar."""
        detail = record.reason
        if record.status == "ok":
            detail = ", ".join(filter(None, (_outcome(record), over_device(record))))
        _say(record.status, record.spec_id, detail)
        self._bar.advance(self._task)


def _say(status: str, spec_id: str, detail: str) -> None:
    progress.CONSOLE.print(f"  {status:<10}  {spec_id}: {detail}", markup=False, soft_wrap=True)


def over_device(record: RunRecord) -> str:
    """A warning if a success needs more memory than its device has, which a trace may; otherwise
    empty."""
    peak = peak_memory_gib(record)
    device = record.spec.get("cluster", {}).get("device", {}).get("memory_gib")
    if record.provenance != "traced" or peak is None or device is None or peak[0] <= device:
        return ""
    return f"WARNING: {peak[0]:.1f} GiB are more than the device's {device:g} GiB"


def _outcome(record: RunRecord) -> str:
    """The main results of a success, in a few words."""
    words = []
    if record.step_s:
        words.append(f"{statistics.median(record.step_s):.3f} s/step")
    if record.losses:
        words.append(f"loss {record.losses[-1]:.4f}")
    peak = peak_memory_gib(record)
    if peak is not None:
        words.append(f"{peak[0]:.2f} GiB")
    kernels = [sums["compute_over_kernels"] for sums in record.predicted.get("kernels", ()) if sums]
    if kernels:
        words.append(f"compute over its kernels {max(kernels):.3f}")
    return ", ".join(words)
