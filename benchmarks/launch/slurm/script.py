"""The resources of each point, which points share a job array, and the scripts of the arrays.

Nothing here calls Slurm. A script is complete and readable, so that it shows exactly what ran.
"""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jinja2

from benchmarks import CHECKOUT
from benchmarks.launch.options import Flag, Flags, SlurmOptions, normal, sbatch_words, words
from benchmarks.launch.points import Point
from benchmarks.launch.slurm.submissions import attempt_name, report_name
from benchmarks.specification import SpecError
from benchmarks.specification.run_spec import RunSpec

_START_S = 300.0  # for imports, process groups, the gate and the model, on a slow file system
_TIME_STEP_MIN = 10  # points whose estimates differ by less share an array
# Steps besides the timed ones: six of the gate, six of its reference (on one rank, but of a smaller
# model), and one with spans.
EXTRA_STEPS = 13
_TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
    autoescape=False,  # shell, not HTML
)
_TEMPLATES.filters["quote"] = lambda value: shlex.quote(str(value))


@dataclass(frozen=True, kw_only=True)
class Resources:
    """The resources of a point; points with equal resources share an array."""

    nodes: int
    ranks_per_node: int
    has_gpus: bool  # one per rank
    minutes: int
    timeout_s: float  # measure.timeout_s: how long the ranks may take
    sbatch: tuple[tuple[str, Flag], ...] = ()  # the site's flags for a point of this size


@dataclass(frozen=True)
class Array:
    """Points with equal resources, and the name and folder of the script that runs them."""

    name: str  # unique, because a job without a known id is found by its name
    resources: Resources
    points: tuple[Point, ...]
    submission: Path
    attempts: tuple[str, ...]  # the names of its points' attempts, without the restart

    @property
    def script(self) -> Path:
        """The path of the rendered script."""
        return self.submission / f"{self.name}.sbatch"

    @property
    def spec_ids(self) -> list[str]:
        """The ids of its points, by array index."""
        return [point.spec.spec_id for point in self.points]

    @property
    def log(self) -> str:
        """The file for the script's output, in sbatch's notation (``%a`` is the array index)."""
        return f"{self.submission / self.name}".replace("%", "%%") + "-%a.log"


def nodes_of(spec: RunSpec) -> int:
    """The number of nodes of a point; raises SpecError if its ranks do not divide among them."""
    nodes = math.ceil(spec.num_gpus / spec.cluster.gpus_per_node)
    if spec.num_gpus % nodes:
        raise SpecError(
            f"num_gpus={spec.num_gpus}: must be a multiple of the {nodes} nodes that it takes "
            f"with cluster.gpus_per_node={spec.cluster.gpus_per_node}"
        )
    return nodes


def resources_of(spec: RunSpec, options: SlurmOptions, step_s: float | None) -> Resources:
    """Nodes, ranks, time and flags of a point.

    ``step_s`` is the predicted time of a step, or None. The time limit is the estimate times the
    safety factor, but at most ``measure.timeout_s``, plus the grace time.
    """
    nodes = nodes_of(spec)
    limit_s = spec.measure.timeout_s
    if step_s is not None:
        steps = spec.measure.warmup_steps + spec.measure.steps + EXTRA_STEPS
        limit_s = min(limit_s, _START_S + options.walltime_safety * steps * step_s)
    steps_of_time = math.ceil((limit_s + options.grace_s) / 60 / _TIME_STEP_MIN)
    return Resources(
        nodes=nodes,
        ranks_per_node=spec.num_gpus // nodes,
        has_gpus=not spec.cluster.device.is_cpu,
        minutes=steps_of_time * _TIME_STEP_MIN,
        timeout_s=spec.measure.timeout_s,
        sbatch=tuple(sorted(options.sbatch_of(spec.num_gpus).items())),
    )


def group(
    points: Sequence[tuple[Point, Resources]],
    submission: Path,
    sweep: str,
    max_array_size: int,
) -> list[Array]:
    """One array per set of resources, the smallest first. An array has at most
    ``max_array_size - 1`` points, because Slurm's indices end below MaxArraySize."""
    by_resources: dict[Resources, list[Point]] = {}
    for point, resources in points:
        by_resources.setdefault(resources, []).append(point)
    ordered = sorted(by_resources, key=lambda r: (r.nodes * r.ranks_per_node, r.minutes, str(r)))
    size = max(1, max_array_size - 1)
    parts = [
        (resources, by_resources[resources][first : first + size])
        for resources in ordered
        for first in range(0, len(by_resources[resources]), size)
    ]
    seen: Counter[str] = Counter()
    arrays = []
    for number, (resources, part) in enumerate(parts):
        names = []
        for spec_id in (point.spec.spec_id for point in part):
            names.append(attempt_name(submission) + f".{seen[spec_id]}" * bool(seen[spec_id]))
            seen[spec_id] += 1
        name = f"{sweep}-{number}"
        arrays.append(Array(name, resources, tuple(part), submission, tuple(names)))
    return arrays


def render_array(array: Array, options: SlurmOptions, runs_dir: Path) -> str:
    """The text of an array's script."""
    sbatch = array_flags(array, options)
    srun: Flags = {"cpu-bind": "cores"}
    if sbatch["ntasks-per-node"] is False:
        srun["ntasks-per-node"] = array.resources.ranks_per_node
    # A rank must see its neighbours' GPUs to reach them directly; so if the job asked for GPUs per
    # task, its step asks for GPUs per node.
    if array.resources.has_gpus and options.gpu_flag == "gpus-per-task":
        srun |= _gpu_flags(array.resources, replace(options, gpu_flag="gpus-per-node"))
    srun |= normal(options.srun)
    return _render(
        "array.sbatch.j2",
        options,
        runs_dir,
        specs=array.spec_ids,
        nodes=array.resources.nodes,
        ranks_per_node=array.resources.ranks_per_node,
        submission=str(array.submission),
        attempts=array.attempts,
        timeout_s=math.ceil(array.resources.timeout_s),
        array=array.name,
        sbatch=sbatch_words(sbatch),
        srun=[shlex.quote(word) for word in words(srun)],
        environment=options.environment,
        worker_python=(
            shlex.quote(options.worker_python) if options.worker_python else options.interpreter
        ),
        exclusive=sbatch.get("exclusive") is True,
        grace_s=options.grace_s,
        requeue=sbatch.get("requeue") is True,
        checkout=str(checkout_of(array.submission, options)),
    )


def array_flags(array: Array, options: SlurmOptions) -> Flags:
    """All flags of sbatch for an array."""
    resources = array.resources
    throttle = f"%{options.max_running}" if options.max_running else ""
    owned: Flags = {
        "job-name": array.name,
        "array": f"0-{len(array.points) - 1}{throttle}",
        "nodes": resources.nodes,
        "ntasks-per-node": resources.ranks_per_node,
        "output": array.log,
        "open-mode": "append",
        "signal": f"B:USR1@{options.grace_s}",
    }
    defaults: Flags = {"time": resources.minutes, **_gpu_flags(resources, options)}
    flags = owned | defaults | dict(resources.sbatch)
    if flags["ntasks-per-node"] is False:  # the site forbids it; the step says it instead
        flags["ntasks"] = resources.nodes * resources.ranks_per_node
    return flags


def _gpu_flags(resources: Resources, options: SlurmOptions) -> Flags:
    """The flag that asks for as many GPUs as ranks, in the site's way; none on CPUs."""
    if not resources.has_gpus or options.gpu_flag == "none":
        return {}
    kind = f"{options.gpu_type}:" if options.gpu_type else ""
    if options.gpu_flag == "gres":
        return {"gres": f"gpu:{kind}{resources.ranks_per_node}"}
    number = 1 if options.gpu_flag == "gpus-per-task" else resources.ranks_per_node
    return {options.gpu_flag: f"{kind}{number}"}


def render_report(submission: Path, sweep: str, options: SlurmOptions, runs_dir: Path) -> str:
    """The text of the report job's script."""
    inherited = {
        name: value
        for name, value in options.sbatch_of(1).items()
        if name in ("account", "partition", "qos")
    }
    flags: Flags = {
        "job-name": report_name(sweep),
        "ntasks": 1,
        "output": f"{submission / report_name(sweep)}".replace("%", "%%") + ".log",
        "kill-on-invalid-dep": "yes",
        "time": 30,
    }
    return _render(
        "report.sbatch.j2",
        options,
        runs_dir,
        report_dir=str(Path(options.report_dir).resolve()),
        sbatch=sbatch_words(flags | inherited | normal(options.report_sbatch)),
        checkout=str(CHECKOUT),
    )


def checkout_of(submission: Path, options: SlurmOptions) -> Path:
    """The checkout from which ranks run: this one, or the copy that ``snapshot`` makes."""
    return submission / ".checkout" if options.snapshot else CHECKOUT


def _render(name: str, options: SlurmOptions, runs_dir: Path, **values: Any) -> str:
    common = {"python": options.interpreter, "setup": options.setup, "runs_dir": str(runs_dir)}
    return _TEMPLATES.get_template(name).render(**common, **values)
