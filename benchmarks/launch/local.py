"""Run points one after another on this machine, a process a rank."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.launch.finish import Ending, finish_attempt
from benchmarks.launch.points import Point
from benchmarks.launch.processes import is_here, run_attempt
from benchmarks.launch.progress import SweepProgress
from benchmarks.records.record import RunRecord
from benchmarks.specification.run_spec import SpecError


def check(points: Sequence[Point], options: dict[str, Any]) -> None:
    """Refuse what this machine cannot run; raises SpecError before any process is started."""
    del options
    for point in points:
        if not is_here(point.spec.cluster.device):
            raise SpecError(
                f"cluster={point.spec.cluster.name}: launcher=local needs that GPU here and none "
                "is found (use cluster=cpu_gloo, or launcher=simulate)"
            )


def launch(
    points: Sequence[Point], options: dict[str, Any], runs_dir: Path, progress: SweepProgress
) -> list[RunRecord]:
    """Run every point; a point that fails does not stop the next."""
    del options
    close_abandoned(runs_dir)
    records = []
    for point in points:
        everyone = [range(point.spec.num_gpus)]
        records.append(run_attempt(point, "local", everyone, runs_dir, progress))
        progress.finished(records[-1])
    return records


def close_abandoned(runs_dir: Path) -> None:
    """Finish attempts whose launcher was killed: their event files still hold what was measured."""
    for launcher in ("local", "trace"):
        for header in runs_dir.glob(f"*/{launcher}-*/attempt.json"):
            _close(header.parent)


def _close(directory: Path) -> None:
    if (directory / "record.json").exists() or _is_alive(directory / "launcher.pid"):
        return
    ending = Ending("failed", "the launcher was killed", interrupted=True)
    finish_attempt(directory, ending=ending)


def _is_alive(pid_file: Path) -> bool:
    try:
        os.kill(int(pid_file.read_text()), 0)
    except (OSError, ValueError):
        return False
    return True
