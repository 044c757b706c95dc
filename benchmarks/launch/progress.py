"""The output of a running sweep: one line per point, and meanwhile the state of the current point.

Lines are never wrapped here, so that a log has one line per point; a terminal wraps long reasons
itself.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Column

from benchmarks.launch.points import Point
from benchmarks.records.metrics import peak_memory_gib
from benchmarks.records.record import RunRecord

_CONSOLE = Console(stderr=True)
_LOG_EVERY_S = 10.0


def announce(points: Sequence[Point], todo: Sequence[Point], launcher: str) -> None:
    """Print how many points will run, and how many are skipped because they have a record."""
    skipped = len(points) - len(todo)
    done = f", {skipped} already recorded (rerun=all runs them again)" if skipped else ""
    say = f"{len(todo)} of {len(points)} points to run with launcher={launcher}{done}"
    for point in points:
        if point.note:
            _CONSOLE.print(point.note, soft_wrap=True, markup=False, highlight=False)
    _CONSOLE.print(say, soft_wrap=True)
    for point in todo:
        if point.plan is None:
            _say("infeasible", point.spec.spec_id, point.reason)


def say(line: str) -> None:
    """Print one line, which only a terminal wraps."""
    _CONSOLE.print(line, markup=False, soft_wrap=True)


def progress_line() -> Progress:
    """A progress bar with counts, time and the current work, in one line of the terminal; in a log
    it prints a line now and then."""
    rest_of_the_line = Column(no_wrap=True, overflow="ellipsis", ratio=1)
    return _Logged(
        BarColumn(bar_width=8),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False, table_column=rest_of_the_line),
        console=_CONSOLE,
        transient=True,
        expand=True,
        disable=not _CONSOLE.is_terminal,
    )


class _Logged(Progress):
    """A progress bar that prints a line every ``_LOG_EVERY_S`` seconds if there is no terminal."""

    def __init__(self, *columns: ProgressColumn, **options: Any) -> None:
        super().__init__(*columns, **options)
        self._started = self._told = time.monotonic()

    def update(self, task_id: TaskID, **fields: Any) -> None:
        """Update a task as rich does, and print a line from time to time if there is no
        terminal."""
        super().update(task_id, **fields)
        self._tell(task_id)

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        """Advance a task as rich does, and print a line from time to time if there is no
        terminal."""
        super().advance(task_id, advance)
        self._tell(task_id)

    def _tell(self, task_id: TaskID) -> None:
        now = time.monotonic()
        if not self.disable or now - self._told < _LOG_EVERY_S:
            return
        self._told = now
        task = next(task for task in self.tasks if task.id == task_id)
        of = "" if task.total is None else f" of {task.total:.0f}"
        line = f"  {now - self._started:.0f} s: {task.completed:.0f}{of}, {task.description}"
        self.console.print(line, markup=False, soft_wrap=True)


class SweepProgress:
    """A progress bar over the points of a sweep, or lines if the output is no terminal."""

    def __init__(self, total: int) -> None:
        self._bar = progress_line()
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
    _CONSOLE.print(f"  {status:<10}  {spec_id}: {detail}", markup=False, soft_wrap=True)


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
