"""Made-up records for the report's tests: plausible sizes, fixed noise, real schedules as spans;
and what tables show of them."""

from __future__ import annotations

import random
from functools import lru_cache
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console

from benchmarks.records.record import SCHEMA_VERSION, GateResult, RankRecord, RunRecord
from benchmarks.report.frame import load_frame
from benchmarks.report.table import Table
from benchmarks.specification.run_spec import spec_from_mapping
from zeropp.schedule import event_loop, lower
from zeropp.schedule.build import build
from zeropp.schedule.program import StageCost
from zeropp.types.timeline import Provenance

QUIET = Console(quiet=True)
MODELS = {"gpt_tiny": (8, 64), "gpt_mini": (8, 128), "gpt_1_5b": (48, 1600)}
LINK = {"bandwidth_gb_s": 5.0, "latency_us": 20.0}
_SUCCESS: dict[str, Any] = {
    "schema_version": SCHEMA_VERSION,
    "status": "ok",
    "reason": "",
    "started_at": "2026-11-20T10:00:00+00:00",
    "ended_at": "2026-11-20T10:01:00+00:00",
    "git_sha": "0123456789abcdef",
    "git_dirty": False,
    "launcher": "local",
}
_SLOWER = {"zeropp": 1.0, "deepspeed_3d": 1.3, "torch_pp": 1.1, "fsdp": 1.2}


def spec_values(
    contender: str = "zeropp", model: str = "gpt_tiny", num_gpus: int = 4, **more: Any
) -> dict[str, Any]:
    """A spec as a mapping; ``more`` replaces top-level keys."""
    layers, hidden = MODELS[model]
    shape = {"name": model, "family": "gpt", "layers": layers, "hidden": hidden, "heads": 4}
    shape |= {"kv_heads": 4, "ffn": 4 * hidden, "vocab": 256, "seq": 64}
    device = {"name": "cpu", "memory_gib": 16.0, "memory_bandwidth_gb_s": 20.0}
    device |= {"matmul_bf16_tflops": 0.05, "matmul_fp32_tflops": 0.05}
    cluster = {"name": "cpu_gloo", "device": device, "gpus_per_node": 8, "nics_per_node": 1}
    cluster |= {"intra": LINK, "inter": LINK}
    values = {
        "model": shape,
        "cluster": cluster,
        "num_gpus": num_gpus,
        "contender": {"name": contender},
        "global_batch": 16,
        "microbatch_size": 1,
        "precision": "fp32",
        "optimizer": {"kind": "sgd", "lr": 0.1},
        "data": {"kind": "synthetic"},
        "measure": {},
    }
    return values | more


def make_record(
    contender: str = "zeropp",
    model: str = "gpt_tiny",
    num_gpus: int = 4,
    *,
    provenance: Provenance = "measured",
    attempt: str = "local-1",
    step_s: list[float] | None = None,
    noise: float = 0.02,
    seed: int = 0,
    spans: bool = True,
    fields: dict[str, Any] | None = None,
    contender_knobs: dict[str, Any] | None = None,
    model_fields: dict[str, Any] | None = None,
    **spec_fields: Any,
) -> RunRecord:
    """A successful record; ``fields`` replaces fields of the record, ``contender_knobs`` adds knobs
    of its contender, ``model_fields`` sizes of its model, the rest replaces keys of the spec."""
    mapping = spec_values(contender, model, num_gpus, **spec_fields)
    mapping["model"] = mapping["model"] | (model_fields or {})
    mapping["contender"] = mapping["contender"] | (contender_knobs or {})
    spec = spec_from_mapping(mapping)
    draw = random.Random(f"{spec.spec_id}{seed}")
    base = 0.4 * spec.model.hidden / num_gpus**0.9 * _SLOWER[contender] / 64
    steps = step_s or [base * (1 + noise * draw.random()) for _ in range(10)]
    peak = int(base * 2**28 / _SLOWER[contender])
    values: dict[str, Any] = {
        "record_id": f"{spec.spec_id}/{attempt}",
        "spec_id": spec.spec_id,
        "spec": spec.to_dict(),
        "provenance": provenance,
        "plan": _plan(num_gpus, peak),
        "gate": _gate(model),
        "losses": [5.5 * 0.9**i * (1 + 1e-7 * draw.random()) for i in range(12)],
        "step_s": steps,
        "ranks": [_rank(rank, steps, peak) for rank in range(num_gpus)],
        "spans": [list(row) for row in span_rows(contender)] if spans else [],
    }
    return RunRecord(**(_SUCCESS | values | (fields or {})))


def _gate(model: str) -> GateResult:
    errors = {"loss_error": 1e-7, "grad_norm_error": 1e-7, "parameter_error": 1e-7}
    return GateResult(passed=True, tolerance=1e-4, shape=model, **errors)  # type: ignore[arg-type]


def _plan(num_gpus: int, peak: int) -> dict[str, Any]:
    return {
        "layout": {"pp": 2, "tp": 1, "shard": num_gpus // 2, "replicate": 1, "chunks": 2},
        "num_microbatches": 4,
        "unit": 2,
        "predicted_memory": [{"parameters": peak // 3, "activations": peak // 2}] * 2,
    }


def _rank(rank: int, step_s: list[float], peak: int) -> RankRecord:
    return RankRecord(
        rank=rank,
        pp_rank=rank % 2,
        environment={"host": "node0", "device": "cpu", "versions": {"torch": "2.13.0"}},
        step_s=step_s,
        counters={},
        peak_rss_bytes=peak,
    )


def write_records(records: list[RunRecord], root: Path) -> Path:
    """Write records as the suite does, ``root/<spec_id>/<attempt>/record.json``."""
    for record in records:
        record.write(root / record.record_id / "record.json")
    return root


@lru_cache
def span_rows(contender: str) -> tuple[tuple[Any, ...], ...]:
    """Spans of a small step of the contender's schedule."""
    name, chunks = ("zeropp", 2) if contender == "zeropp" else ("1f1b", 1)
    compute = build(name, num_ranks=2, chunks=chunks, num_microbatches=4)
    program = lower(compute, gather=contender == "zeropp")
    share = 0.01 / chunks
    cost = StageCost(
        forward=share,
        backward_input=share,
        backward_weight=share,
        unshard=0.004,
        reduce_grad=0.004,
        transfer=0.001,
    )
    spans = event_loop.run(program, [cost] * compute.num_stages).spans()
    return tuple((s.rank, s.lane, s.action, s.start_s, s.end_s) for s in spans)


def frame_of(*records: object, root: Path) -> pd.DataFrame:
    write_records(list(records), root)  # type: ignore[arg-type]
    frame, skipped = load_frame([root])
    assert skipped == []
    return frame


def column(table: Table, head: str) -> list[str]:
    """A column of a table as people read it, top to bottom."""
    grid = table.grid()
    index = grid.heads.index(head)
    return [row[index].text for row in grid.rows]


def failed(status: str, reason: str) -> dict[str, object]:
    return {"status": status, "reason": reason, "step_s": [], "spans": []}
