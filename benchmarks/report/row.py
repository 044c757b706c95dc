"""One record as one row of a report's frame: everything that a report knows of an attempt."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from benchmarks.records.metrics import (
    mfu,
    model_tflops_per_gpu,
    peak_memory_gib,
    tokens_per_s_per_gpu,
)
from benchmarks.records.record import RunRecord
from benchmarks.records.recorded_spec import RecordedSpec, recorded_spec
from benchmarks.records.stats import summarise
from benchmarks.report.configuration import (
    asked_knobs,
    configuration_text,
    evidence_of,
    has_default_degrees,
    source_of,
)
from zeropp.cost import parameter_count


@dataclass(frozen=True, kw_only=True)
class Row:
    """The quantities of one attempt; a number that is not known is NaN.

    ``basis`` says how a study chose the degrees of all contenders of a cell (``best plans``,
    ``equal degrees``). It is empty for records; their ``default_degrees`` says whether nobody has
    tuned them.
    """

    model: str
    parameters: float
    cluster: str
    on_cpu: bool
    num_gpus: int
    global_batch: int
    seq: int
    precision: str
    evidence: str
    contender: str  # its key, not its label
    layout: str
    status: str
    reason: str
    record_id: str
    spec_id: str
    memory_limit_gib: float
    basis: str = ""
    default_degrees: bool = False
    knobs: dict[str, Any] = field(default_factory=dict)  # as asked for, and the microbatch size
    gate: str = "-"
    started_at: str = ""
    git: str = ""
    code: str = ""  # digest of the suite's files that ran; empty in older records
    path: str = ""
    samples_step_s: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    data_seed: str = ""
    has_spans: bool = False
    is_lone: bool = False
    memory_by_kind: dict[str, int] = field(default_factory=dict)
    predicted_gib: float = math.nan
    source: dict[str, Any] = field(default_factory=dict)
    step_s: float = math.nan
    step_s_low: float = math.nan
    step_s_high: float = math.nan
    spread: float = math.nan
    unstable: bool = False
    tokens_per_s_per_gpu: float = math.nan
    tokens_per_s_per_gpu_low: float = math.nan
    tokens_per_s_per_gpu_high: float = math.nan
    model_tflops_per_gpu: float = math.nan
    model_tflops_per_gpu_low: float = math.nan
    model_tflops_per_gpu_high: float = math.nan
    mfu: float = math.nan
    mfu_low: float = math.nan
    mfu_high: float = math.nan
    peak_gib: float = math.nan
    memory_kind: str = ""


def row_of(record: RunRecord, path: str = "") -> Row:
    """The row of one record. Raises RecordError if its spec lacks a key that rows need."""
    spec = recorded_spec(record)
    peak, kind = peak_memory_gib(record) or (math.nan, "")
    fine = record.status == "ok" and bool(record.step_s)
    measured = record.provenance == "measured"
    planned = record.plan.get("predicted_memory", [])
    return Row(
        **cell_of(spec),
        evidence=evidence_of(record),
        contender=spec.contender.name,
        layout=configuration_text(record, spec),
        default_degrees=has_default_degrees(spec),
        knobs=asked_knobs(record, spec),
        status=record.status,
        reason=record.reason,
        gate="-" if record.gate is None else ("passed" if record.gate.passed else "FAILED"),
        started_at=record.started_at,
        git=record.git_sha[:10] + ("+" if record.git_dirty else ""),
        code=record.code_digest,
        path=path,
        spec_id=record.spec_id,
        record_id=record.record_id,
        samples_step_s=record.step_s,
        losses=record.losses,
        data_seed=f"{spec.data} {spec.seed}",
        has_spans=bool(record.spans),
        is_lone="lone_step_s" in record.predicted,
        memory_by_kind=_fullest(record.predicted.get("memory", planned)),
        predicted_gib=sum(_fullest(planned).values()) / 2**30 or math.nan,
        source=source_of(record),
        peak_gib=peak,
        memory_kind=kind,
        **(throughput_of(spec, record.step_s, measured=measured) if fine else {}),
    )


def cell_of(spec: RecordedSpec) -> dict[str, Any]:
    """The fields of a row that describe its cell, which are the same for every contender."""
    shape, device = spec.model.shape, spec.cluster.device
    return {
        "model": spec.model.name,
        "parameters": math.nan if shape is None else float(parameter_count(shape)),
        "cluster": spec.cluster.name,
        "on_cpu": device.name == "cpu" or spec.cluster.name == "cpu_gloo",
        "num_gpus": spec.num_gpus,
        "global_batch": spec.global_batch,
        "seq": spec.model.seq,
        "precision": spec.precision,
        "memory_limit_gib": _known(device.memory_gib),
    }


def throughput_of(spec: RecordedSpec, step_s: list[float], *, measured: bool) -> dict[str, Any]:
    """The median step time and the rates that follow from it, with 95 % intervals if measured."""
    time = summarise(step_s)
    found: dict[str, Any] = {"spread": time.spread, "unstable": time.unstable and measured}
    low, high = (time.low, time.high) if measured else (math.nan, math.nan)
    for end, step, slow in (
        ("", time.median, time.median),
        ("_low", low, high),
        ("_high", high, low),
    ):
        found[f"step_s{end}"] = step
        found[f"tokens_per_s_per_gpu{end}"] = tokens_per_s_per_gpu(spec, slow)
        found[f"model_tflops_per_gpu{end}"] = _known(model_tflops_per_gpu(spec, slow))
        found[f"mfu{end}"] = _known(mfu(spec, slow))
    return found


def _known(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _fullest(ranks: list[dict[str, int]]) -> dict[str, int]:
    """Bytes by kind of the rank with the largest total; empty if none is known."""
    return max(ranks, key=lambda kinds: sum(kinds.values()), default={})
