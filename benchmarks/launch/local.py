"""Runs points one after another on this machine, with one process per rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from benchmarks.launch.finish import Ending, close_for_another
from benchmarks.launch.frozen import DamagedError
from benchmarks.launch.options import LocalOptions
from benchmarks.launch.owner import may_live
from benchmarks.launch.points import Point, or_unwritten
from benchmarks.launch.processes import is_here, run_attempt
from benchmarks.launch.sweep_progress import SweepProgress
from benchmarks.records.record import RunRecord
from benchmarks.specification.run_spec import SpecError

_KILLED = Ending("failed", "the launcher was killed", interrupted=True)


def check(points: Sequence[Point], options: LocalOptions) -> None:
    """Raise SpecError, before any process is started, if this machine cannot run a point."""
    del options
    for point in points:
        if not is_here(point.spec.cluster.device):
            raise SpecError(
                f"cluster={point.spec.cluster.name}: launcher=local needs that GPU here and none "
                "is found (use cluster=cpu_gloo, or launcher=simulate)"
            )


def launch(
    points: Sequence[Point], options: LocalOptions, runs_dir: Path, progress: SweepProgress
) -> list[RunRecord]:
    """Run every point, also after one has failed; returns the records."""
    close_abandoned(runs_dir)
    records = []
    for point in points:
        everyone, shown = [range(point.spec.num_gpus)], options.steps
        run = partial(
            run_attempt,
            point,
            launcher="local",
            worlds=everyone,
            runs_dir=runs_dir,
            progress=progress,
            shows_steps=shown,
        )
        records.append(or_unwritten(point, "local", run))
        progress.finished(records[-1])
    return records


def close_abandoned(runs_dir: Path) -> list[str]:
    """Write the records of attempts whose launcher is dead, from their event files.

    Returns one line per attempt that cannot be recorded. Attempts whose launcher may still run,
    here, on another host or in another container, are left alone.
    """
    problems = []
    for directory in _open_attempts(runs_dir):
        if may_live(directory):
            continue
        try:
            close_for_another(directory, _KILLED)
        except (DamagedError, OSError) as error:
            problems.append(str(error))
    return problems


def _open_attempts(runs_dir: Path) -> Iterator[Path]:
    for launcher in ("local", "trace"):
        for directory in sorted(runs_dir.glob(f"*/{launcher}-*")):
            if directory.is_dir() and not (directory / "record.json").exists():
                yield directory
