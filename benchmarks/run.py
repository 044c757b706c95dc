"""The suite's entry: Hydra composes the points, the launcher runs them, the report closes.

Exit status: 0 where every point ended ``ok`` or ``infeasible`` as one of a sweep, 1 where one
failed, 2 on bad input, before anything was started, 130 where the user interrupted it.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from benchmarks.specification.command import run_command
from benchmarks.specification.compose import compose
from benchmarks.specification.run_spec import SpecError


def main() -> int:
    """Command line; see ``--help``."""
    return run_command(_run, "interrupted; the same command goes on from here")


def _run() -> int:
    configs = compose("config")
    if not configs:  # --help, --cfg: Hydra has answered
        return 0
    for config in configs:
        _check_run_keys(config)
    if "verdict" in configs[0]:  # an experiment that finds its points by itself
        return int(importlib.import_module("benchmarks.studies.claim_33").run(configs[0]))
    from benchmarks.launch.points import plan_point
    from benchmarks.launch.sweep import run_points, spec_of

    points = [plan_point(spec_of(config)) for config in configs]
    if len(points) == 1 and points[0].plan is None:
        raise SpecError(points[0].reason)
    return run_points(points, configs)


def _check_run_keys(config: dict[str, Any]) -> None:
    """Refuse what a command line has deleted or emptied of the keys that are not the spec's."""
    for field in ("runs_dir", "report_dir", "rerun", "launcher"):
        if field not in config:
            raise SpecError(f"{field}: missing; it has no default")
    if not isinstance(config["launcher"], dict) or "kind" not in config["launcher"]:
        from benchmarks.launch.points import PROVENANCE

        raise SpecError(f"launcher={config['launcher']!r}: must be one of {', '.join(PROVENANCE)}")
    for field in ("runs_dir", "report_dir"):
        if not isinstance(config[field], str) or not config[field]:
            raise SpecError(f"{field}={config[field]!r}: must be a folder's path")


if __name__ == "__main__":
    sys.exit(main())
