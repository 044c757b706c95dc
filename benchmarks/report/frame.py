"""Records as a DataFrame: one row a record, one column a quantity, units in the names."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks.contenders import CONTENDERS
from benchmarks.metrics import (
    mfu,
    model_tflops_per_gpu,
    peak_memory_gib,
    spec_of,
    tokens_per_s_per_gpu,
)
from benchmarks.record import RecordError, RunRecord, find_records, read_record
from benchmarks.spec import SpecError
from benchmarks.stats import summarise

# What makes two rows comparable: they differ in the contender alone.
CELL = ["model", "cluster", "num_gpus", "global_batch", "seq", "precision", "evidence"]


def load_frame(roots: Iterable[Path]) -> tuple[pd.DataFrame, list[str]]:
    """All records below the roots, oldest first, and a line for each file that was skipped."""
    rows, skipped = [], []
    for path in find_records(roots):
        try:
            record = read_record(path)
            rows.append(row_of(record) | {"path": str(path)})
        except (RecordError, SpecError) as error:
            skipped.append(str(error))
    frame = pd.DataFrame(rows)
    if not frame.empty:
        frame = frame.sort_values("started_at", kind="stable", ignore_index=True)
    return frame, skipped


def row_of(record: RunRecord) -> dict[str, Any]:
    """One record's quantities; throughput and memory are missing where nothing was measured."""
    spec = spec_of(record)
    contender = CONTENDERS.get(spec.contender.name)
    row: dict[str, Any] = {
        "model": spec.model.name,
        "cluster": spec.cluster.name,
        "num_gpus": spec.num_gpus,
        "global_batch": spec.global_batch,
        "seq": spec.model.seq,
        "precision": spec.precision,
        "evidence": record.provenance,
        "contender": contender.label if contender else spec.contender.name,
        "layout": layout_text(record),
        "status": record.status,
        "reason": record.reason,
        "gate": "-" if record.gate is None else ("passed" if record.gate.passed else "FAILED"),
        "started_at": record.started_at,
        "git": record.git_sha[:10] + ("+" if record.git_dirty else ""),
        "spec_id": record.spec_id,
        "record_id": record.record_id,
        "samples_step_s": record.step_s,
        "losses": record.losses,
    }
    if record.status == "ok" and record.step_s:
        row |= _throughput(record)
    memory = peak_memory_gib(record)
    if memory is not None:
        row["peak_gib"], row["memory_kind"] = memory
    return row


def layout_text(record: RunRecord) -> str:
    """Degrees above 1 in the field's short form, e.g. ``PP2 ZeRO-3x2 V2``."""
    layout = record.plan.get("layout", {})
    shard = layout.get("shard", 1)
    zero = " ZeRO-1" if layout.get("replicate_zero") else ""
    parts = {
        "TP": layout.get("tp", 1),
        "PP": layout.get("pp", 1),
        "V": layout.get("chunks", 1),
        "ZeRO-3x": shard,
        "DP": layout.get("replicate", 1),
    }
    text = " ".join(f"{name}{degree}" for name, degree in parts.items() if degree > 1)
    return (text + zero) if text else "1 rank"


def latest_ok(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows for tables: of each cell, contender and layout the latest success, or, where there
    is none, the latest attempt with its status."""
    if frame.empty:
        return frame
    ranked = frame.assign(_ok=frame["status"] == "ok")
    ranked = ranked.sort_values(["_ok", "started_at"], kind="stable")
    kept = ranked.drop_duplicates([*CELL, "contender", "layout"], keep="last")
    return kept.drop(columns="_ok").sort_values([*CELL, "contender"], ignore_index=True)


def _throughput(record: RunRecord) -> dict[str, Any]:
    spec, time = spec_of(record), summarise(record.step_s)
    return {
        "step_s": time.median,
        "step_s_low": time.low,
        "step_s_high": time.high,
        "spread": time.spread,
        "unstable": time.unstable and record.provenance == "measured",
        "tokens_per_s_per_gpu": tokens_per_s_per_gpu(spec, time.median),
        "tokens_per_s_per_gpu_low": tokens_per_s_per_gpu(spec, time.high),
        "tokens_per_s_per_gpu_high": tokens_per_s_per_gpu(spec, time.low),
        "model_tflops_per_gpu": model_tflops_per_gpu(spec, time.median),
        "mfu": mfu(spec, time.median),
    }
