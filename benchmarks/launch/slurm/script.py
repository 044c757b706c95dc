"""Job scripts from points: options, resources, grouping into arrays, Jinja2 templates.

Nothing here talks to Slurm. A script is readable and complete: what ran can be read from it.
"""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2

from benchmarks import CHECKOUT
from benchmarks.launch.points import Point
from benchmarks.specification.run_spec import RunSpec, SpecError, validated

_START_S = 300.0  # imports, process groups, the gate and building, on a slow file system
_TIME_STEP_MIN = 10  # points whose estimates differ by less share an array
_EXTRA_STEPS = 3  # the gate's, its reference, and the one with spans

Flag = str | int | float | bool | None
Flags = dict[str, Flag]

# What a point's resources and the suite's bookkeeping decide; a flag map may not.
_OWNED = {
    *("array", "dependency", "distribution", "kill-on-bad-exit", "parsable", "signal"),
    *("nodes", "ntasks", "ntasks-per-node"),
    *("chdir", "error", "job-name", "open-mode", "output"),
}


@dataclass(frozen=True)
class SlurmOptions:
    """``conf/launcher/slurm.yaml``, checked."""

    kind: str
    report_dir: str
    dry_run: bool = False
    python: str | None = None
    worker_python: str | None = None
    setup: list[str] = field(default_factory=list)
    grace_s: int = 60
    walltime_safety: float = 3.0
    sbatch: Flags = field(default_factory=dict)
    srun: Flags = field(default_factory=dict)
    report_sbatch: Flags = field(default_factory=dict)

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    @property
    def interpreter(self) -> str:
        """Python of the batch script."""
        return shlex.quote(self.python or sys.executable)

    @property
    def worker_interpreter(self) -> str:
        """Python of the ranks."""
        return shlex.quote(self.worker_python) if self.worker_python else self.interpreter


@dataclass(frozen=True)
class Resources:
    """What a point asks of Slurm; points with equal ones share an array."""

    nodes: int
    gpus_per_node: int  # and ranks
    minutes: int


@dataclass(frozen=True)
class Array:
    """Points with equal resources, and the name and place of the script that runs them."""

    name: str  # unique: a job is found by it before it has an id
    resources: Resources
    points: tuple[Point, ...]
    submission: Path

    @property
    def script(self) -> Path:
        """Where the rendered script is kept."""
        return self.submission / f"{self.name}.sbatch"

    @property
    def spec_ids(self) -> list[str]:
        """Its points, by array index."""
        return [point.spec.spec_id for point in self.points]

    def log(self, index: int | str) -> Path:
        """The batch script's output; ``index`` is a number or Slurm's pattern for it."""
        return self.submission / f"{self.name}-{index}.log"


def read_options(values: Mapping[str, Any]) -> SlurmOptions:
    """Check the launcher's options; raises SpecError with one line."""
    options = validated(SlurmOptions, dict(values), "launcher")
    for group in ("sbatch", "srun", "report_sbatch"):
        for name in getattr(options, group):
            if _dashed(name) in _OWNED:
                raise SpecError(f"launcher.{group}.{name}: the suite sets this flag from the point")
    return options


def nodes_of(spec: RunSpec) -> int:
    """Nodes of a point; raises SpecError where its ranks do not divide over them."""
    nodes = math.ceil(spec.num_gpus / spec.cluster.gpus_per_node)
    if spec.num_gpus % nodes:
        raise SpecError(
            f"num_gpus={spec.num_gpus}: must be a multiple of the {nodes} nodes that it takes "
            f"with cluster.gpus_per_node={spec.cluster.gpus_per_node}"
        )
    return nodes


def resources_of(spec: RunSpec, options: SlurmOptions, step_s: float | None) -> Resources:
    """Nodes, GPUs and time of a point.

    ``step_s`` is the predicted time of a step where a model of it exists. The time limit is the
    estimate times the safety factor, or ``measure.timeout_s``, whichever is less, and the grace.
    """
    nodes = nodes_of(spec)
    limit_s = spec.measure.timeout_s
    if step_s is not None:
        steps = spec.measure.warmup_steps + spec.measure.steps + _EXTRA_STEPS
        limit_s = min(limit_s, _START_S + options.walltime_safety * steps * step_s)
    steps_of_time = math.ceil((limit_s + options.grace_s) / 60 / _TIME_STEP_MIN)
    return Resources(nodes, spec.num_gpus // nodes, steps_of_time * _TIME_STEP_MIN)


def group(points: Sequence[tuple[Point, Resources]], submission: Path, sweep: str) -> list[Array]:
    """One array for each set of resources, smallest first."""
    by_resources: dict[Resources, list[Point]] = {}
    for point, resources in points:
        by_resources.setdefault(resources, []).append(point)
    ordered = sorted(by_resources, key=lambda r: (r.nodes * r.gpus_per_node, r.minutes))
    return [
        Array(f"{sweep}-{number}", resources, tuple(by_resources[resources]), submission)
        for number, resources in enumerate(ordered)
    ]


def render_array(array: Array, options: SlurmOptions, runs_dir: Path) -> str:
    """The script of an array."""
    resources = array.resources
    owned: Flags = {
        "job-name": array.name,
        "array": f"0-{len(array.points) - 1}",
        "nodes": resources.nodes,
        "ntasks-per-node": resources.gpus_per_node,
        "output": str(array.log("%a")),
        "open-mode": "append",
        "signal": f"B:USR1@{options.grace_s}",
    }
    # Per node and not per task: a rank must see its neighbours' GPUs to reach them directly.
    defaults: Flags = {"gpus-per-node": resources.gpus_per_node, "time": resources.minutes}
    return _render(
        "array.sbatch.j2",
        options,
        runs_dir,
        specs=array.spec_ids,
        nodes=resources.nodes,
        ranks_per_node=resources.gpus_per_node,
        submission=str(array.submission),
        array=array.name,
        sbatch=_flags(owned | defaults | _normal(options.sbatch)),
        srun=[shlex.quote(flag) for flag in _flags(options.srun)],
        worker_python=options.worker_interpreter,
    )


def render_report(submission: Path, sweep: str, options: SlurmOptions, runs_dir: Path) -> str:
    """The script of the report job."""
    sbatch = _normal(options.sbatch)
    inherited = {k: v for k, v in sbatch.items() if k in ("account", "partition", "qos")}
    owned: Flags = {
        "job-name": f"{sweep}-report",
        "ntasks": 1,
        "output": str(submission / f"{sweep}-report.log"),
        "kill-on-invalid-dep": "yes",
    }
    defaults: Flags = {"time": 30}
    return _render(
        "report.sbatch.j2",
        options,
        runs_dir,
        report_dir=str(Path(options.report_dir).resolve()),
        sbatch=_flags(owned | defaults | inherited | _normal(options.report_sbatch)),
    )


def _render(name: str, options: SlurmOptions, runs_dir: Path, **values: Any) -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # shell, not HTML
    )
    environment.filters["quote"] = shlex.quote
    return environment.get_template(name).render(
        python=options.interpreter,
        setup=options.setup,
        checkout=str(CHECKOUT),
        runs_dir=str(runs_dir),
        **values,
    )


def _dashed(name: str) -> str:
    return name.replace("_", "-")


def _normal(flags: Flags) -> Flags:
    """Flags as they are spelled; null says nothing, so that a default may stand."""
    return {_dashed(name): value for name, value in flags.items() if value is not None}


def _flags(flags: Flags) -> list[str]:
    """``--name=value`` each; true is a bare flag, false leaves it out."""
    words = []
    for name, value in _normal(flags).items():
        if value is True:
            words.append(f"--{name}")
        elif value is not False:
            words.append(f"--{name}={value}")
    return words
