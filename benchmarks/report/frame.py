"""Records as a DataFrame: one row a record, one column a quantity, units in the names."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks.records.metrics import (
    UNMEASURED,
    mfu,
    model_tflops_per_gpu,
    peak_memory_gib,
    tokens_per_s_per_gpu,
)
from benchmarks.records.record import RecordError, RunRecord, find_records, read_record
from benchmarks.records.recorded_spec import PLAIN_KNOBS, RecordedSpec, recorded_spec
from benchmarks.records.stats import summarise
from benchmarks.specification.contenders import CONTENDERS

# What makes two rows comparable: they differ in the contender alone.
CELL = ["model", "cluster", "num_gpus", "global_batch", "seq", "precision", "evidence"]

QUANTITIES = [
    "step_s",
    "tokens_per_s_per_gpu",
    "model_tflops_per_gpu",
    "mfu",
    "peak_gib",
    "memory_kind",
]  # columns that every frame has, even where no record has a value


def load_frame(roots: Iterable[Path]) -> tuple[pd.DataFrame, list[str]]:
    """All records below the roots, oldest first, and a line for each file that was skipped."""
    rows, skipped = [], []
    for path in find_records(roots):
        try:
            rows.append(_row_at(path))
        except RecordError as error:
            skipped.append(str(error))
    frame = pd.DataFrame(rows)
    if not frame.empty:
        frame = frame.reindex(columns=[*frame.columns.union(QUANTITIES, sort=False)])
        frame = frame.sort_values("started_at", kind="stable", ignore_index=True)
    return frame, skipped


def _row_at(path: Path) -> dict[str, Any]:
    record = read_record(path)
    try:
        return row_of(record) | {"path": str(path)}
    except RecordError as error:
        raise RecordError(f"{path}: {error}") from None


def row_of(record: RunRecord) -> dict[str, Any]:
    """One record's quantities; throughput and memory are missing where nothing was measured.
    Raises RecordError where its spec lacks what makes rows comparable."""
    spec = recorded_spec(record)
    contender = CONTENDERS.get(spec.contender.name)
    row: dict[str, Any] = {
        "model": spec.model.name,
        "cluster": spec.cluster.name,
        "num_gpus": spec.num_gpus,
        "global_batch": spec.global_batch,
        "seq": spec.model.seq,
        "precision": spec.precision,
        "evidence": evidence_of(record),
        "contender": contender.label if contender else spec.contender.name,
        "layout": configuration_text(record, spec),
        "status": record.status,
        "reason": record.reason,
        "gate": "-" if record.gate is None else ("passed" if record.gate.passed else "FAILED"),
        "started_at": record.started_at,
        "git": record.git_sha[:10] + ("+" if record.git_dirty else ""),
        "spec_id": record.spec_id,
        "record_id": record.record_id,
        "samples_step_s": record.step_s,
        "losses": record.losses,
        "data_seed": f"{spec.data} {spec.seed}",
        "has_spans": bool(record.spans),
        "is_lone": "lone_step_s" in record.predicted,
        "memory_by_kind": _fullest(record.predicted.get("memory", _planned(record))),
        "predicted_gib": sum(_fullest(_planned(record)).values()) / 2**30 or None,
        "memory_limit_gib": spec.cluster.device.memory_gib,
        "source": source_of(record),
    }
    if record.status == "ok" and record.step_s:
        row |= _throughput(spec, record)
    row["peak_gib"], row["memory_kind"] = peak_memory_gib(record) or (None, None)
    return row


# Knobs that the text names in a form of their own.
_NAMED = {"name", "tp", "pp", "chunks", "shard", "replicate", "replicate_zero", "unit"}
_NAMED |= {"schedule", "recompute", "sequence_parallel", "compile"}


def configuration_text(record: RunRecord, spec: RecordedSpec) -> str:
    """Degrees above 1 and the knobs that matter, in the field's short form.

    For example ``PP2 V2 ZeRO-3x2 U4``. Where there is no plan (infeasible), from what was asked:
    ``auto`` where every degree was left open.
    """
    name, plan = spec.contender.name, record.plan
    knobs = PLAIN_KNOBS | spec.contender.knobs
    degrees = plan.get("layout") or {k: v for k, v in knobs.items() if v != "auto"}
    names = {"tp": "TP", "pp": "PP", "chunks": "V", "shard": "ZeRO-3x", "replicate": "DP"}
    parts = [f"{short}{degrees[key]}" for key, short in names.items() if degrees.get(key, 1) > 1]
    if degrees.get("replicate_zero"):
        parts.append("ZeRO-1")
    if plan.get("unit", 0) not in (0, plan.get("num_microbatches")):
        parts.append(f"U{plan['unit']}")
    if knobs["schedule"] not in ("auto", name):
        parts.append(knobs["schedule"])
    if spec.microbatch_size > 1:
        parts.append(f"b{spec.microbatch_size}")
    if knobs["recompute"] not in ("auto", "none"):
        parts.append(f"recompute {knobs['recompute']}")
    parts += [word for word in ("sequence_parallel", "compile") if knobs[word] is True]
    other = {k: v for k, v in knobs.items() if k not in _NAMED and v != "auto"}
    parts += [f"{k} {v}" for k, v in other.items() if v != PLAIN_KNOBS.get(k)]
    return " ".join(parts) or ("1 rank" if spec.num_gpus == 1 else "auto")


def evidence_of(record: RunRecord) -> str:
    """What kind of number a record holds, e.g. ``simulated with traced compute``."""
    return " with ".join(filter(None, (record.provenance, record.variant)))


def source_of(record: RunRecord) -> dict[str, Any]:
    """Where a number comes from: commit, machine, versions, what was asked for and checked."""
    first = record.ranks[0].environment if record.ranks else {}
    return {
        "record": record.record_id,
        "evidence": evidence_of(record),
        "status": f"{record.status} {record.reason}".strip(),
        "started": record.started_at,
        "ended": record.ended_at,
        "commit": record.git_sha + (" with local changes" if record.git_dirty else ""),
        "launcher": record.launcher,
        "hosts": sorted({rank.environment.get("host", "?") for rank in record.ranks}),
        "device": first.get("device", "none"),
        "processor": first.get("cpu", ""),
        "python": first.get("python", ""),
        "versions": first.get("versions", {}),
        "variables": first.get("variables", {}),
        "correctness gate": None if record.gate is None else vars(record.gate),
        "raw steps [s]": record.step_s,
        "plan": record.plan,
        "slurm": record.slurm,
        "spec": record.spec,
    }


def latest_ok(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows for tables: of each cell, contender and layout the latest success, or, where there
    is none, the latest attempt with its status."""
    if frame.empty:
        return frame
    ranked = frame.assign(_ok=frame["status"] == "ok")
    ranked = ranked.sort_values(["_ok", "started_at"], kind="stable")
    kept = ranked.drop_duplicates([*CELL, "contender", "layout"], keep="last")
    return kept.drop(columns="_ok").sort_values([*CELL, "contender"], ignore_index=True)


def best_configuration(rows: pd.DataFrame) -> pd.DataFrame:
    """Of each cell and contender the fastest configuration: what figures compare."""
    if rows.empty or "tokens_per_s_per_gpu" not in rows:
        return rows.iloc[:0]
    fine = rows[(rows["status"] == "ok") & rows["tokens_per_s_per_gpu"].notna()]
    fine = fine.sort_values("tokens_per_s_per_gpu", kind="stable")
    kept = fine.drop_duplicates([*CELL, "contender"], keep="last")
    return kept.sort_values([*CELL, "contender"], ignore_index=True)


def _planned(record: RunRecord) -> list[dict[str, int]]:
    """Bytes by kind that the cost model predicts for the plan, a pipeline rank each; empty where
    an older version of the suite did not ask it."""
    planned: list[dict[str, int]] = record.plan.get("predicted_memory", [])
    return planned


def _fullest(ranks: list[dict[str, int]]) -> dict[str, int]:
    """Bytes by kind of the rank that needs most; empty where none is known."""
    return max(ranks, key=lambda kinds: sum(kinds.values()), default={})


def _throughput(spec: RecordedSpec, record: RunRecord) -> dict[str, Any]:
    time = summarise(record.step_s)
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


def notes_of(rows: pd.DataFrame) -> list[str]:
    """What must be said beside the numbers of these rows."""
    simulated = rows["evidence"].str.startswith("simulated") & rows["contender"].eq("ZeroPP")
    return [UNMEASURED] if simulated.any() else []
