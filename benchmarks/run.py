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
from omegaconf.errors import OmegaConfBaseException

from benchmarks.errors import one_line
from benchmarks.launch.points import (
    PROVENANCE,
    Point,
    Rerun,
    plan_point,
    still_to_run,
    write_unstarted,
)
from benchmarks.progress import SweepProgress, announce
from benchmarks.record import RunRecord
from benchmarks.report import write_report
from benchmarks.spec import RunSpec, SpecError, spec_from_mapping

_CONF = Path(__file__).resolve().parents[1] / "conf"
_RUN_KEYS = {"launcher", "runs_dir", "report_dir", "rerun", "verdict"}
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
        return run_points(points, configs)
    except (SpecError, HydraException, OmegaConfBaseException) as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
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
    """The part of a composed configuration that is the spec; raises SpecError on other keys."""
    unknown = sorted(set(config) - _SPEC_KEYS - _RUN_KEYS)
    if unknown:
        known = ", ".join(sorted(_SPEC_KEYS | _RUN_KEYS))
        raise SpecError(f"{unknown[0]}={config[unknown[0]]!r}: unknown key (known: {known})")
    return spec_from_mapping({k: v for k, v in config.items() if k in _SPEC_KEYS})


def run_points(points: list[Point], configs: list[dict[str, Any]]) -> int:
    """Run what is missing, launcher by launcher, record what is infeasible, write the report."""
    rerun, runs_dir = configs[0]["rerun"], Path(configs[0]["runs_dir"])
    if rerun not in get_args(Rerun):
        raise SpecError(f"rerun={rerun!r}: must be one of {', '.join(get_args(Rerun))}")
    groups: dict[str, list[Point]] = {}
    options: dict[str, dict[str, Any]] = {}
    for point, config in zip(points, configs, strict=True):
        groups.setdefault(config["launcher"]["kind"], []).append(point)
        options[config["launcher"]["kind"]] = config["launcher"]
    launchers = {kind: importlib.import_module(f"benchmarks.launch.{kind}") for kind in groups}
    for kind, launcher in launchers.items():
        launcher.check(groups[kind])
    records: list[RunRecord] = []
    for kind, launcher in launchers.items():
        todo = still_to_run(groups[kind], runs_dir, PROVENANCE[kind], rerun)
        announce(groups[kind], todo, kind)
        for point in todo:
            if point.plan is None:
                write_unstarted(point, runs_dir, kind, "infeasible", point.reason)
        feasible = [point for point in todo if point.plan is not None]
        with SweepProgress(len(feasible)) as progress:
            records += launcher.launch(feasible, options[kind], runs_dir, progress)
    roots = dict.fromkeys(runs_dir / point.spec.spec_id for point in points)
    write_report(list(roots), Path(configs[0]["report_dir"]))
    return 0 if all(r.status in ("ok", "infeasible") for r in records) else 1


if __name__ == "__main__":
    sys.exit(main())
