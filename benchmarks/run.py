"""The command that runs points: Hydra composes them, a launcher runs them, a report is made.

Exit status: 0 if every point ended ``ok``, or ``infeasible`` in a sweep, or was submitted; 1 if one
failed, in this call or in an earlier one; 2 on bad input, before anything is started; 130 after
Ctrl-C.
"""

from __future__ import annotations

import importlib
import sys
from contextlib import closing
from typing import Any

from benchmarks.specification import SpecError
from benchmarks.specification.command import run_command

# What an experiment may name as ``study``: a module whose ``run`` makes and judges its own points,
# as a key of the study's name says.
_STUDIES = {"verdict": "benchmarks.verdict", "atlas": "benchmarks.verdict.atlas"}


def main() -> int:
    """Run the command line; returns its exit status. ``--help`` lists groups and keys."""
    return run_command(_run, "interrupted; the same command goes on from here", closed=1)


def _run() -> int:
    from benchmarks.specification.compose import compose

    configs = compose("config")
    if not configs:  # Hydra has answered --help or --cfg
        return 0
    for config in configs:
        _check_run_keys(config)
    if study := configs[0].get("study"):
        return int(importlib.import_module(_STUDIES[study]).run(configs[0]))
    from benchmarks.launch.sweep import point_of, run_points
    from benchmarks.specification.progress import track

    with closing(track(configs, len(configs), "points planned")) as each:
        points = [point_of(config) for config in each]
    if len(points) == 1 and points[0].plan is None:
        raise SpecError(points[0].reason)
    return run_points(points, configs)


def _check_run_keys(config: dict[str, Any]) -> None:
    """Raise SpecError if a key that is not part of the spec is missing or empty."""
    for field in ("runs_dir", "report_dir", "rerun", "launcher"):
        if field not in config:
            raise SpecError(f"{field}: missing; it has no default")
    if not isinstance(config["launcher"], dict) or "kind" not in config["launcher"]:
        from benchmarks.launch.options import KINDS

        raise SpecError(f"launcher={config['launcher']!r}: must be one of {', '.join(KINDS)}")
    for field in ("runs_dir", "report_dir"):
        if not isinstance(config[field], str) or not config[field]:
            raise SpecError(f"{field}={config[field]!r}: must be the path of a folder")
    if (study := config.get("study")) not in [None, *_STUDIES]:
        raise SpecError(f"study={study!r}: must be one of {', '.join(_STUDIES)}")
    for name in _STUDIES:
        if (study == name) != (name in config):
            raise SpecError(f"study={name}: needs the key {name}, which nothing else reads")


if __name__ == "__main__":
    sys.exit(main())
