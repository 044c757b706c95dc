"""Reads a ``plans.csv``, the table of ``experiment=claim_33``, as rows of a report.

A line is one contender in one cell, with the best plan that the simulator found. Cells with a
scaled network are left out, because only the maps of the verdict show them.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.records.record import RecordError, find_below
from benchmarks.records.recorded_spec import (
    RecordedCluster,
    RecordedContender,
    RecordedDevice,
    RecordedModel,
    RecordedSpec,
)
from benchmarks.report.row import Row, cell_of, throughput_of
from benchmarks.specification.compose import preset
from benchmarks.specification.run_spec import SpecError
from zeropp.cluster import Cluster
from zeropp.shape import ModelShape

_BASES = {"best": "best plans", "equal": "equal degrees", "paper": "the paper's setting"}
_PRECISION = "bf16"  # of files without that column, as in conf/experiment/claim_33.yaml


def find_plans(roots: Iterable[Path]) -> Iterator[Path]:
    """The paths of all ``plans.csv`` below the roots; a root may be such a file itself."""
    for root in roots:
        if root.is_dir():
            yield from find_below(root, "plans.csv")
        elif root.suffix == ".csv":
            yield root


def read_plans(path: Path) -> list[Row]:
    """The rows at the clusters' own bandwidth; raises RecordError, which names the file."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            lines = [line for line in csv.DictReader(file) if float(line["bandwidth"]) == 1.0]
        return [_row(line) for line in lines]
    except (OSError, ValueError, TypeError, KeyError, SpecError) as error:
        raise RecordError(
            f"{path}: not a table of plans ({type(error).__name__}: {error})"
        ) from None


def _row(line: dict[str, str]) -> Row:
    spec = _spec(line)
    basis, name = _BASES[line["mode"]], line["contender"]
    identity = "-".join((line["cluster"], line["mode"], line["global_batch"]))
    fits = line["step_s"] != ""
    steps = [float(line["step_s"])] if fits else []
    return Row(
        **cell_of(spec),
        evidence=line["provenance"],
        basis=basis,
        contender=name,
        layout=line["plan"],
        status="ok" if fits else "oom",
        reason="" if fits else line["plan"],
        record_id=f"{line['model']}-{name}-{line['num_gpus']}gpu-{identity}",
        spec_id=f"{line['model']}-{name}-{line['num_gpus']}gpu-{identity}",
        git=line["commit"],
        samples_step_s=steps,
        source={"commit": line["commit"], "evidence": f"{line['provenance']}, {basis}"} | line,
        **(_numbers(spec, steps, line) if fits else {}),
    )


def _numbers(spec: RecordedSpec, steps: list[float], line: dict[str, str]) -> dict[str, Any]:
    found = throughput_of(spec, steps, measured=False)
    return found | {"peak_gib": float(line["peak_gib"]), "memory_kind": "predicted"}


def _spec(line: dict[str, str]) -> RecordedSpec:
    shape = preset("model", line["model"], ModelShape)
    cluster = preset("cluster", line["cluster"], Cluster)
    device = cluster.device
    return RecordedSpec(
        model=RecordedModel(shape.name, shape.seq, asdict(shape)),
        cluster=RecordedCluster(
            cluster.name,
            RecordedDevice(
                device.name, device.memory_gib, device.peak_bf16_tflops, device.peak_fp32_tflops
            ),
        ),
        num_gpus=int(line["num_gpus"]),
        contender=RecordedContender(line["contender"], {}),
        global_batch=int(line["global_batch"]),
        precision=line.get("precision") or _PRECISION,
    )
