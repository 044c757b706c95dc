"""The suite's entry: Hydra composes the points, the launcher runs them, the report closes.

Exit status: 0 where every point ended ``ok`` or ``infeasible`` as one of a sweep, 1 where one
failed, 2 on bad input, before anything was started, 130 where the user interrupted it.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

from benchmarks.compose import compose
from benchmarks.launch.points import (
    PROVENANCE,
    Point,
    Rerun,
    plan_point,
    still_to_run,
    variant_of,
    write_unstarted,
)
from benchmarks.progress import SweepProgress, announce
from benchmarks.record import RunRecord, check_writable
from benchmarks.report import write_report
from benchmarks.spec import RunSpec, SpecError, spec_from_mapping

_RUN_KEYS = {"launcher", "runs_dir", "report_dir", "rerun", "verdict"}
_SPEC_KEYS = {field.name for field in dataclasses.fields(RunSpec)}


def main() -> int:
    """Command line; see ``--help``."""
    try:
        configs = compose("config")
        if not configs:  # --help, --cfg: Hydra has answered
            return 0
        for config in configs:
            _check_run_keys(config)
        if "verdict" in configs[0]:  # an experiment that finds its points by itself
            return int(importlib.import_module("benchmarks.verdict").run(configs[0]))
        points = [plan_point(spec_of(config)) for config in configs]
        if len(points) == 1 and points[0].plan is None:
            raise SpecError(points[0].reason)
        return run_points(points, configs)
    except SpecError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr)
        return 130


def _check_run_keys(config: dict[str, Any]) -> None:
    """Refuse what a command line has deleted or emptied of the keys that are not the spec's."""
    for field in ("runs_dir", "report_dir", "rerun", "launcher"):
        if field not in config:
            raise SpecError(f"{field}: missing; it has no default")
    if not isinstance(config["launcher"], dict) or "kind" not in config["launcher"]:
        raise SpecError(f"launcher={config['launcher']!r}: must be one of {', '.join(PROVENANCE)}")
    for field in ("runs_dir", "report_dir"):
        if not isinstance(config[field], str) or not config[field]:
            raise SpecError(f"{field}={config[field]!r}: must be a folder's path")


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
    report_dir = Path(configs[0]["report_dir"])
    if rerun not in get_args(Rerun):
        raise SpecError(f"rerun={rerun!r}: must be one of {', '.join(get_args(Rerun))}")
    groups = _by_launcher(points, configs)
    for options, group in groups:
        variant_of(options)
        _launcher(options).check(group, options)
    dry_run = any(options.get("dry_run") for options, _ in groups)  # then nothing is written
    if not dry_run:
        check_writable("runs_dir", runs_dir)
        check_writable("report_dir", report_dir)
    records: list[RunRecord] = []
    for options, group in groups:
        kind = options["kind"]
        todo = still_to_run(group, runs_dir, PROVENANCE[kind], variant_of(options), rerun)
        announce(group, todo, kind)
        feasible = [point for point in todo if point.plan is not None]
        if not dry_run:
            _record_infeasible(todo, runs_dir, options)
        with SweepProgress(len(feasible)) as progress:
            records += _launcher(options).launch(feasible, options, runs_dir, progress)
    if not dry_run:
        roots = dict.fromkeys(runs_dir / point.spec.spec_id for point in points)
        write_report(list(roots), report_dir)
    return 0 if all(r.status in ("ok", "infeasible") for r in records) else 1


def _by_launcher(
    points: list[Point], configs: list[dict[str, Any]]
) -> list[tuple[dict[str, Any], list[Point]]]:
    """Points with equal options of the launcher together; raises SpecError on an unknown one."""
    groups: list[tuple[dict[str, Any], list[Point]]] = []
    for point, config in zip(points, configs, strict=True):
        options = config["launcher"]
        if options["kind"] not in PROVENANCE:
            known = ", ".join(PROVENANCE)
            raise SpecError(f"launcher.kind={options['kind']!r}: must be one of {known}")
        same = [group for known, group in groups if known == options]
        if same:
            same[0].append(point)
        else:
            groups.append((options, [point]))
    return groups


def _launcher(options: dict[str, Any]) -> ModuleType:
    return importlib.import_module(f"benchmarks.launch.{options['kind']}")


def _record_infeasible(points: list[Point], runs_dir: Path, options: dict[str, Any]) -> None:
    kind, variant = options["kind"], variant_of(options)
    for point in points:
        if point.plan is None:
            write_unstarted(point, runs_dir, kind, "infeasible", point.reason, variant=variant)


if __name__ == "__main__":
    sys.exit(main())
