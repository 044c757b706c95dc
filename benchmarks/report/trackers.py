"""Sends records to Weights & Biases or TensorBoard through their own libraries, if installed.

Every record becomes one run: its specification is the configuration, loss, gradient norm, time and
throughput have one point per step, and its medians are the summary. Nothing is sent unless it is
asked for.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

from benchmarks.records.metrics import mfu, model_tflops_per_gpu, tokens_per_s_per_gpu
from benchmarks.records.record import RunRecord
from benchmarks.records.recorded_spec import read_records, read_spec
from benchmarks.report.frame import row_of
from benchmarks.specification import SpecError

_SUMMARY = ("step_s", "tokens_per_s_per_gpu", "model_tflops_per_gpu", "mfu", "peak_gib")


def to_tensorboard(roots: Sequence[Path], folder: Path) -> int:
    """Write one TensorBoard run per record below ``folder``; returns their number. Raises SpecError
    if TensorBoard is not installed."""
    _library("--tensorboard", "tensorboard")
    writer = _library("--tensorboard", "torch.utils.tensorboard").SummaryWriter
    records = list(_records(roots))
    for record in records:
        with writer(str(folder / record.record_id.replace("/", "_"))) as run:
            run.add_text("spec", f"```json\n{json.dumps(record.spec, indent=1)}\n```")
            for step, values in _steps(record):
                for name, value in values.items():
                    run.add_scalar(name, value, step)
            for name, value in _summary(record).items():
                run.add_scalar(f"summary/{name}", value, 0)
    return len(records)


def to_wandb(roots: Sequence[Path], project: str) -> int:
    """Send one W&B run per record to a project; returns their number. Raises SpecError if wandb is
    not installed."""
    wandb = _library("--wandb", "wandb")
    records = list(_records(roots))
    for record in records:
        run = wandb.init(
            project=project,
            name=record.record_id,
            group=record.spec_id,
            tags=[record.provenance, record.status],
            config=record.spec,
        )
        for step, values in _steps(record):
            run.log(values, step=step)
        run.summary.update(_summary(record))
        run.finish()
    return len(records)


def _library(option: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError:
        package = name.partition(".")[0]
        raise SpecError(f"{option}: {package} is not installed (pip install {package})") from None


def _records(roots: Sequence[Path]) -> Iterator[RunRecord]:
    """All readable records below the roots; names the files that are none."""
    skipped: list[str] = []
    folders = [root for root in roots if root.suffix == ".json" or root.is_dir()]
    yield from read_records(folders, skipped)
    for line in skipped:
        print(f"skipped {line}")


def _steps(record: RunRecord) -> Iterator[tuple[int, dict[str, float]]]:
    """Each step, counted from 1 with the warm-up, and what is known of it; as in the lines that
    ranks print (``step_line``)."""
    spec, seconds = read_spec(record.spec), [*record.warmup_s, *record.step_s]
    series: dict[str, list[float | None]] = {
        "loss": [*record.losses],
        "grad_norm": [*record.grad_norms],
        "step_s": [*seconds],
        "tokens_per_s_per_gpu": [tokens_per_s_per_gpu(spec, s) for s in seconds],
        "model_tflops_per_gpu": [model_tflops_per_gpu(spec, s) for s in seconds],
        "mfu": [mfu(spec, s) for s in seconds],
    }
    for step in range(max(map(len, series.values()))):
        known = {name: values[step] for name, values in series.items() if step < len(values)}
        yield step + 1, {name: value for name, value in known.items() if value is not None}


def _summary(record: RunRecord) -> dict[str, float]:
    """Medians and the peak; without those that are not known (NaN)."""
    row = row_of(record)
    return {name: value for name in _SUMMARY if (value := row[name]) == value}
