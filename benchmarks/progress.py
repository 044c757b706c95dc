"""What a person sees while a sweep runs: one line a point, and the point's state meanwhile."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.launch.points import Point
from benchmarks.record import RunRecord

_CONSOLE = Console(stderr=True)


def announce(points: Sequence[Point], todo: Sequence[Point], launcher: str) -> None:
    """Say how much there is to do, and what is skipped because it is done."""
    skipped = len(points) - len(todo)
    done = f", {skipped} already recorded (rerun=all runs them again)" if skipped else ""
    _CONSOLE.print(f"{len(todo)} of {len(points)} points to run with launcher={launcher}{done}")
    for point in todo:
        if point.plan is None:
            _CONSOLE.print(f"  infeasible  {point.spec.spec_id}: {point.reason}", markup=False)


class SweepProgress:
    """A progress bar over the points of a sweep; quiet where the output is not a terminal."""

    def __init__(self, total: int) -> None:
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=_CONSOLE,
            transient=True,
        )
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
        """Show what a running point does."""
        self._bar.update(self._task, description=f"{point.spec.spec_id}: {state}")

    def finished(self, record: RunRecord) -> None:
        """Print the outcome of a point and move the bar on."""
        detail = record.reason
        if record.status == "ok":
            detail = _outcome(record)
        _CONSOLE.print(f"  {record.status:<10}  {record.spec_id}: {detail}", markup=False)
        self._bar.advance(self._task)


def _outcome(record: RunRecord) -> str:
    """What a success found, in a few words."""
    words = []
    if record.step_s:
        words.append(f"{statistics.median(record.step_s):.3f} s a step")
    if record.losses:
        words.append(f"loss {record.losses[-1]:.4f}")
    if "peak_bytes" in record.predicted:
        words.append(f"peak {record.predicted['peak_bytes'] / 2**30:.2f} GiB")
    return ", ".join(words)
