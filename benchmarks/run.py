"""The suite's entry: Hydra composes the points, the launcher runs them, the report closes.

Exit status: 0 where every point ended ``ok`` or ``infeasible`` as one of a sweep, 1 where one
failed, 2 on bad input, before anything was started.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import sys
from pathlib import Path
from typing import Any, cast, get_args

import hydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from benchmarks.launch.points import (
    PROVENANCE,
    Point,
    Rerun,
    plan_point,
    still_to_run,
    write_unstarted,
)
from benchmarks.progress import SweepProgress, announce
from benchmarks.report import write_report
from benchmarks.spec import RunSpec, SpecError, spec_from_mapping

_CONF = Path(__file__).resolve().parents[1] / "conf"
_SPEC_KEYS = {field.name for field in dataclasses.fields(RunSpec)}


def main() -> int:
    """Command line; see ``--help``."""
    try:
        configs = compose_points()
        if not configs:  # --help, --cfg: Hydra has answered
            return 0
        if "verdict" in configs[0]:  # an experiment that finds its points by itself
            return int(importlib.import_module("benchmarks.verdict").run(configs[0]))
        points = [plan_point(spec_of(config)) for config in configs]
        if len(points) == 1 and points[0].plan is None:
            raise SpecError(points[0].reason)
        return run_points(points, configs[0])
    except (SpecError, HydraException, OmegaConfBaseException) as error:
        print(f"error: {_one_line(error)}", file=sys.stderr)
        return 2


def compose_points() -> list[dict[str, Any]]:
    """Let Hydra compose every point of the command line; it does nothing else.

    Collecting the points first is what lets all of them be checked before one is started, and
    lets a launcher see the sweep as a whole.
    """
    composed: list[DictConfig] = []
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # raise, so that the error can be one line
    hydra.main(version_base="1.3", config_path=str(_CONF), config_name="config")(composed.append)()
    return [_plain(config) for config in composed]


def _plain(config: DictConfig) -> dict[str, Any]:
    values = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    return cast("dict[str, Any]", values)


def spec_of(config: dict[str, Any]) -> RunSpec:
    """The part of a composed configuration that is the spec."""
    return spec_from_mapping({k: v for k, v in config.items() if k in _SPEC_KEYS})


def run_points(points: list[Point], config: dict[str, Any]) -> int:
    """Run what is missing, record what is infeasible, and write the report."""
    kind, rerun = config["launcher"]["kind"], config["rerun"]
    if rerun not in get_args(Rerun):
        raise SpecError(f"rerun={rerun!r}: must be one of {', '.join(get_args(Rerun))}")
    runs_dir = Path(config["runs_dir"])
    launcher = importlib.import_module(f"benchmarks.launch.{kind}")
    launcher.check(points)
    todo = still_to_run(points, runs_dir, PROVENANCE[kind], rerun)
    announce(points, todo, kind)
    for point in todo:
        if point.plan is None:
            write_unstarted(point, runs_dir, kind, "infeasible", point.reason)
    feasible = [point for point in todo if point.plan is not None]
    with SweepProgress(len(feasible)) as progress:
        records = launcher.launch(feasible, config["launcher"], runs_dir, progress)
    write_report([runs_dir / p.spec.spec_id for p in points], Path(config["report_dir"]))
    return 0 if all(r.status in ("ok", "infeasible") for r in records) else 1


def _one_line(error: Exception) -> str:
    if isinstance(error, MissingMandatoryValue):
        return f"{error.full_key}: missing; it has no default"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return "; ".join(lines[:2])


if __name__ == "__main__":
    sys.exit(main())
