"""The resources of each point, and which points share a job array. It does not call Slurm."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.launch.points import Point
from benchmarks.launch.slurm.options import Flag, Flags, SlurmOptions
from benchmarks.specification.run_spec import RunSpec, SpecError

_START_S = 300.0  # for imports, process groups, the gate and the model, on a slow file system
_TIME_STEP_MIN = 10  # points whose estimates differ by less share an array
# Steps besides the timed ones: six of the gate, six of its reference (on one rank, but of a smaller
# model), and one with spans.
_EXTRA_STEPS = 13
MAX_ARRAY_SIZE = 1001  # Slurm's default


@dataclass(frozen=True, kw_only=True)
class Resources:
    """The resources of a point; points with equal resources share an array."""

    nodes: int
    ranks_per_node: int
    has_gpus: bool  # one per rank
    minutes: int
    sbatch: tuple[tuple[str, Flag], ...] = ()  # the site's flags for a point of this size

    @property
    def flags(self) -> Flags:
        """The site's flags as a mapping."""
        return dict(self.sbatch)


@dataclass(frozen=True)
class Array:
    """Points with equal resources, and the name and folder of the script that runs them."""

    name: str  # unique, because a job without a known id is found by its name
    resources: Resources
    points: tuple[Point, ...]
    submission: Path

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
        steps = spec.measure.warmup_steps + spec.measure.steps + _EXTRA_STEPS
        limit_s = min(limit_s, _START_S + options.walltime_safety * steps * step_s)
    steps_of_time = math.ceil((limit_s + options.grace_s) / 60 / _TIME_STEP_MIN)
    return Resources(
        nodes=nodes,
        ranks_per_node=spec.num_gpus // nodes,
        has_gpus=not spec.cluster.device.is_cpu,
        minutes=steps_of_time * _TIME_STEP_MIN,
        sbatch=tuple(sorted(options.sbatch_of(spec.num_gpus).items())),
    )


def group(
    points: Sequence[tuple[Point, Resources]],
    submission: Path,
    sweep: str,
    max_array_size: int = MAX_ARRAY_SIZE,
) -> list[Array]:
    """One array per set of resources, the smallest first. An array has at most
    ``max_array_size - 1`` points, because Slurm's indices end below MaxArraySize."""
    by_resources: dict[Resources, list[Point]] = {}
    for point, resources in points:
        by_resources.setdefault(resources, []).append(point)
    ordered = sorted(
        by_resources, key=lambda r: (r.nodes * r.ranks_per_node, r.minutes, str(r.sbatch))
    )
    size = max(1, max_array_size - 1)
    parts = [
        (resources, by_resources[resources][first : first + size])
        for resources in ordered
        for first in range(0, len(by_resources[resources]), size)
    ]
    return [
        Array(f"{sweep}-{number}", resources, tuple(part), submission)
        for number, (resources, part) in enumerate(parts)
    ]
