"""Ranks that ran without their peers (``launcher=trace`` with real tensors), one line a rank."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks.records.record import RankRecord, RunRecord, read_record


def lone_table(rows: pd.DataFrame) -> pd.DataFrame:
    """What each lone rank's step, compute and memory were; "-" where a CPU has no such thing."""
    rows = rows[rows["is_lone"]]
    lines = [
        {key: row[key] for key in ("model", "cluster")}
        | {"GPUs": row["num_gpus"], "batch": row["global_batch"]}
        | {key: row[key] for key in ("contender", "layout")}
        | line
        | {"record": row["record_id"]}
        for _, row in rows.iterrows()
        for line in _lines(read_record(Path(row["path"])))
    ]
    return pd.DataFrame(lines).set_index("record") if lines else pd.DataFrame()


def _lines(record: RunRecord) -> Iterator[dict[str, Any]]:
    found, ranks = record.predicted, {rank.rank: rank for rank in record.ranks}
    for rank, steps, sums in zip(
        found["ranks"], found["lone_step_s"], found["kernels"], strict=True
    ):
        yield {
            "rank": rank,
            "step without peers [s]": f"{statistics.median(steps):.3f}" if steps else "-",
            "compute over kernels": _share(sums, "compute_s", "kernels_s", ".3f"),
            "host-bound": _share(sums, "host_bound_s", "step_s", ".1%"),
            "gathers beside compute": _share(sums, "gather_beside_compute_s", "gather_s", ".0%"),
            **_memory(ranks[rank]),
        }


def _share(sums: dict[str, float], part: str, whole: str, form: str) -> str:
    return format(sums[part] / sums[whole], form) if sums.get(whole) else "-"


def _memory(rank: RankRecord) -> dict[str, str]:
    peaks = {"allocated": rank.peak_allocated_bytes, "reserved": rank.peak_reserved_bytes}
    return {
        f"{kind} [GiB]": "-" if peak is None else f"{peak / 2**30:.2f}"
        for kind, peak in peaks.items()
    }
