"""From the ``verdict`` mapping of a configuration to cells, each of them once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.specification.compose import preset
from benchmarks.specification.run_spec import validated
from benchmarks.studies.claim_33.cells import Cell
from zeropp.cluster import Cluster
from zeropp.literals import Precision
from zeropp.plan import Task
from zeropp.shape import ModelShape

_STRICT = {"extra": "forbid"}


@dataclass(frozen=True)
class _BatchMap:
    """A map over the batch and another quantity, for one model on one cluster."""

    model: str
    cluster: str
    sequences_per_gpu: list[int]

    __pydantic_config__ = _STRICT


@dataclass(frozen=True)
class MapSpec(_BatchMap):
    """The map over GPU count and batch."""

    num_gpus: list[int]


@dataclass(frozen=True)
class BandwidthSpec(_BatchMap):
    """The map over inter-node bandwidth and batch."""

    num_gpus: int
    factors: list[float]


@dataclass(frozen=True, kw_only=True)
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
    """The mapping, checked; raises SpecError with one line for a mistake."""
    return validated(VerdictSpec, values, "verdict")


def cells_of(spec: VerdictSpec, precision: Precision) -> list[Cell]:
    """All cells, each once. Those whose search takes longest come first, so that no core is still
    busy with one of them when the others have nothing left."""
    unique = {cell.key: cell for cell in _cells(spec, precision)}
    return sorted(unique.values(), key=lambda c: c.task.global_batch * c.task.shape.layers)[::-1]


def _cells(spec: VerdictSpec, precision: Precision) -> Iterator[Cell]:
    def cell(model: str, cluster: str, *, gpus: int, sequences: int, factor: float = 1.0) -> Cell:
        shape, machine = preset("model", model, ModelShape), preset("cluster", cluster, Cluster)
        return Cell(
            Task(
                shape=shape,
                cluster=machine,
                num_gpus=gpus,
                global_batch=gpus * sequences,
                precision=precision,
            ),
            factor,
        )

    for cluster in spec.clusters:
        for model, counts in spec.num_gpus.items():
            for gpus in counts:
                for sequences in spec.sequences_of.get(model, spec.sequences_per_gpu):
                    yield cell(model, cluster, gpus=gpus, sequences=sequences)
    grid, band = spec.map, spec.bandwidth
    for gpus in grid.num_gpus:
        for sequences in grid.sequences_per_gpu:
            yield cell(grid.model, grid.cluster, gpus=gpus, sequences=sequences)
    for factor in band.factors:
        for sequences in band.sequences_per_gpu:
            yield cell(
                band.model, band.cluster, gpus=band.num_gpus, sequences=sequences, factor=factor
            )
