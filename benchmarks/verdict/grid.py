"""From the ``verdict`` part of a configuration to cells, each of them once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from pydantic import TypeAdapter, ValidationError

from benchmarks.spec import SpecError
from benchmarks.verdict.cells import Cell
from zeropp.cost.cluster import Cluster
from zeropp.plan import Precision
from zeropp.shape import ModelShape
from zeropp.tune.space import Task

_CONF = Path(__file__).resolve().parents[2] / "conf"
_STRICT = {"extra": "forbid"}


@dataclass(frozen=True)
class MapSpec:
    """GPU count x batch for one model on one cluster."""

    model: str
    cluster: str
    num_gpus: list[int]
    sequences_per_gpu: list[int]

    __pydantic_config__ = _STRICT


@dataclass(frozen=True)
class BandwidthSpec:
    """Inter-node bandwidth x batch for one model on one cluster."""

    model: str
    cluster: str
    num_gpus: int
    sequences_per_gpu: list[int]
    factors: list[float]

    __pydantic_config__ = _STRICT


@dataclass(frozen=True)
class VerdictSpec:
    """The ``verdict`` mapping of ``conf/experiment/claim_33.yaml``, checked."""

    tolerance: float
    clusters: list[str]
    sequences_per_gpu: list[int]
    num_gpus: dict[str, list[int]]  # by model
    sequences_of: dict[str, list[int]]  # instead of sequences_per_gpu, by model
    map: MapSpec
    bandwidth: BandwidthSpec

    __pydantic_config__ = _STRICT


def verdict_spec(values: Any) -> VerdictSpec:
    """Check the mapping; raises SpecError with one line."""
    try:
        return TypeAdapter(VerdictSpec).validate_python(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise SpecError(f"verdict.{where}={first['input']!r}: {first['msg'].lower()}") from None


def cells_of(spec: VerdictSpec, precision: Precision) -> list[Cell]:
    """All cells, each once, those that are quickly searched first."""
    unique = {cell.key: cell for cell in _cells(spec, precision)}
    return sorted(unique.values(), key=lambda c: c.task.num_gpus * c.task.shape.layers)


def _cells(spec: VerdictSpec, precision: Precision) -> Iterator[Cell]:
    def cell(model: str, cluster: str, gpus: int, sequences: int, factor: float = 1.0) -> Cell:
        shape, machine = _load("model", model, ModelShape), _load("cluster", cluster, Cluster)
        return Cell(Task(shape, machine, gpus, gpus * sequences, precision), factor)

    for cluster in spec.clusters:
        for model, counts in spec.num_gpus.items():
            for gpus in counts:
                for sequences in spec.sequences_of.get(model, spec.sequences_per_gpu):
                    yield cell(model, cluster, gpus, sequences)
    grid, band = spec.map, spec.bandwidth
    for gpus in grid.num_gpus:
        for sequences in grid.sequences_per_gpu:
            yield cell(grid.model, grid.cluster, gpus, sequences)
    for factor in band.factors:
        for sequences in band.sequences_per_gpu:
            yield cell(band.model, band.cluster, band.num_gpus, sequences, factor)


@lru_cache
def _load(group: str, name: str, kind: type) -> Any:
    path = _CONF / group / f"{name}.yaml"
    if not path.exists():
        known = ", ".join(sorted(p.stem for p in path.parent.glob("*.yaml")))
        raise SpecError(f"verdict: {group}={name!r}: no such preset (known: {known})")
    return TypeAdapter(kind).validate_python(OmegaConf.to_container(OmegaConf.load(path)))
