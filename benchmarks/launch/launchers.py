"""The launchers by the ``kind`` of their options: the only place that names them all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from benchmarks.launch import local, replay, simulate, trace
from benchmarks.launch.points import Point
from benchmarks.launch.running import Sweep, SweepProgress
from benchmarks.launch.slurm import submit
from benchmarks.records.record import RunRecord


class Launcher(Protocol):
    """What the module of a launcher has. ``options`` are of its own type."""

    def check(self, points: Sequence[Point], options: Any, sweep: Sweep) -> None:
        """Raise SpecError, before anything is started or written, if a point cannot be launched."""

    def settle(self, runs_dir: Path) -> dict[str, str]:
        """Record the attempts that are over, and return the points under way, by id, with a line on
        each. Raises LaunchError if that cannot be known."""

    def launch(
        self, points: Sequence[Point], options: Any, runs_dir: Path, progress: SweepProgress
    ) -> list[RunRecord]:
        """Run points that have a plan, or submit them; returns the records of those that have
        ended."""


LAUNCHERS: Mapping[str, Launcher] = {
    "local": local,
    "slurm": submit,
    "trace": trace,
    "replay": replay,
    "simulate": simulate,
}
