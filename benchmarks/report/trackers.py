"""Sends records to Weights & Biases or TensorBoard through their own libraries, if installed.

Every record becomes one run: its specification is the configuration, time and loss have one point
per step, and its medians are the summary. Nothing is sent unless it is asked for.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks.records.record import RunRecord, find_records, read_record
from benchmarks.report.row import Row, row_of
from benchmarks.specification.run_spec import SpecError

_SUMMARY = ("step_s", "tokens_per_s_per_gpu", "model_tflops_per_gpu", "mfu", "peak_gib")


def to_tensorboard(roots: Sequence[Path], folder: Path) -> int:
    """Write one TensorBoard run per record below ``folder``; returns their number. Raises SpecError
    if TensorBoard is not installed."""
    _library("--tensorboard", "tensorboard")
    writer = _library("--tensorboard", "torch.utils.tensorboard").SummaryWriter
    records = _records(roots)
    for record in records:
        with writer(str(folder / record.record_id.replace("/", "_"))) as run:
            run.add_text("spec", f"```json\n{json.dumps(record.spec, indent=1)}\n```")
            for name, values in _series(record).items():
                for step, value in enumerate(values):
                    run.add_scalar(name, value, step)
            for name, value in _summary(record).items():
                run.add_scalar(f"summary/{name}", value, 0)
    return len(records)


def to_wandb(roots: Sequence[Path], project: str) -> int:
    """Send one W&B run per record to a project; returns their number. Raises SpecError if wandb is
    not installed."""
    wandb = _library("--wandb", "wandb")
    records = _records(roots)
    for record in records:
        run = wandb.init(
            project=project,
            name=record.record_id,
            group=record.spec_id,
            tags=[record.provenance, record.status],
            config=record.spec,
        )
        series = _series(record)
        for step in range(max(map(len, series.values()), default=0)):
            run.log({name: values[step] for name, values in series.items() if step < len(values)})
        run.summary.update(_summary(record))
        run.finish()
    return len(records)


def _library(option: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError:
        package = name.partition(".")[0]
        raise SpecError(f"{option}: {package} is not installed (pip install {package})") from None


def _records(roots: Sequence[Path]) -> list[RunRecord]:
    return [read_record(path) for path in find_records(roots) if path.suffix == ".json"]


def _series(record: RunRecord) -> dict[str, list[float]]:
    """Values per step, by name: losses of all steps, and times of the timed steps."""
    series = {"step_s": record.step_s, "loss": record.losses}
    return {name: values for name, values in series.items() if values}


def _summary(record: RunRecord) -> dict[str, Any]:
    row: Row = row_of(record)
    return {name: value for name in _SUMMARY if (value := getattr(row, name)) == value}
