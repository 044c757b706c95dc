"""What every launcher does with its points: runs them one after another, shows how far they are,
tells how they ended, and refuses those that cannot run."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.launch.attempt import OK, Ending, new_header, or_unwritten, write_unstarted
from benchmarks.launch.options import LauncherOptions
from benchmarks.launch.points import Point, Rerun
from benchmarks.records.metrics import memory_text, peak_memory_gib
from benchmarks.records.record import RunRecord
from benchmarks.specification import SpecError
from benchmarks.specification import progress as bars
from benchmarks.specification.contenders import CONTENDERS


class LaunchError(RuntimeError):
    """Nothing could be started; the message is one line."""


@dataclass(frozen=True)
class Sweep:
    """What a command says of all of its points. ``retries``: how often what ended from outside is
    tried again."""

    runs_dir: Path
    report_dir: Path
    rerun: Rerun
    repeats: int
    retries: int


def check_rank(point: Point, *, here: bool = True) -> None:
    """Raise SpecError for a point whose ranks cannot run: attention ends at documents in prices
    alone, and ``here`` its contender's package must be installed."""
    if document := point.spec.model.document:
        raise SpecError(
            f"model.document={document}: only simulations end attention at documents "
            "(use launcher=simulate, or model.document=0)"
        )
    spec = point.spec
    if here and (missing := CONTENDERS[spec.contender.name].missing(spec.precision)):
        raise SpecError(missing)


def check_once(kind: str, sweep: Sweep) -> None:
    """Raise SpecError for repeats with a launcher that gives the same each time."""
    if sweep.repeats > 1:
        raise SpecError(f"repeats={sweep.repeats}: launcher={kind} gives the same each time")


def one_by_one(
    points: Sequence[Point], kind: str, progress: SweepProgress, run: Callable[[Point], RunRecord]
) -> list[RunRecord]:
    """Run every point, also after one has failed; returns the records."""
    records = []
    for point in points:
        records.append(or_unwritten(point.spec, kind, partial(run, point)))
        progress.finished(records[-1])
    return records


def without_ranks(
    point: Point, launcher: str, runs_dir: Path, results: Callable[[], dict[str, Any]]
) -> RunRecord:
    """Record an attempt for which the launcher runs the contender's code itself: the fields of
    RunRecord that ``results`` returns. An error in that code is the point's result."""
    header, ending, fields = new_header(launcher, point.plan), OK, dict[str, Any]()
    try:
        fields = results()
    except Exception as error:
        ending = Ending("failed", f"{type(error).__name__}: {str(error).strip()[:500]}")
    return write_unstarted(point.spec, runs_dir, header, ending, **fields)


def refuse(point: Point, options: LauncherOptions, runs_dir: Path, ending: Ending) -> RunRecord:
    """Record a point that ends before a rank is started."""
    header = new_header(options.kind, point.plan, options.variant)
    write = partial(write_unstarted, point.spec, runs_dir, header, ending)
    return or_unwritten(point.spec, options.kind, write)


def say(line: str) -> None:
    """Print one line, which only a terminal wraps."""
    bars.CONSOLE.print(line, markup=False, soft_wrap=True)


class SweepProgress:
    """A progress bar over the points of a sweep, or lines if the output is no terminal."""

    def __init__(self, total: int) -> None:
        self._bar = bars.progress_line()
        self._task = self._bar.add_task("starting", total=total)

    def __enter__(self) -> SweepProgress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def update(self, point: Point, state: str) -> None:
        """Show the state of a running point."""
        without_hash = point.spec.spec_id.rpartition("-")[0]
        self._bar.update(self._task, description=f"{without_hash}: {state}")

    def finished(self, record: RunRecord) -> None:
        """Print the outcome of a point and advance the bar."""
        detail = record.reason
        if record.status == "ok":
            # The main results of a success, in a few words
            words = []
            if record.step_s:
                words.append(f"{statistics.median(record.step_s):.3f} s/step")
            if record.losses:
                words.append(f"loss {record.losses[-1]:.4f}")
            if peak := peak_memory_gib(record):
                words.append(memory_text(peak[0]))
            if kernels := [
                sums["compute_over_kernels"] for sums in record.predicted.get("kernels", ()) if sums
            ]:
                words.append(f"compute over its kernels {max(kernels):.3f}")
            detail = ", ".join(filter(None, (", ".join(words), over_device(record))))
        say_outcome(record.status, record.spec_id, detail)
        self._bar.advance(self._task)


def say_outcome(status: str, spec_id: str, detail: str) -> None:
    """Print what became of a point, in one line."""
    bars.CONSOLE.print(f"  {status:<10}  {spec_id}: {detail}", markup=False, soft_wrap=True)


def over_device(record: RunRecord) -> str:
    """A warning if a success needs more memory than its device has, which a trace may; otherwise
    empty."""
    peak = peak_memory_gib(record)
    device = record.spec.get("cluster", {}).get("device", {}).get("memory_gib")
    if record.provenance != "traced" or peak is None or device is None or peak[0] <= device:
        return ""
    return f"WARNING: {peak[0]:.1f} GiB are more than the device's {device:g} GiB"
