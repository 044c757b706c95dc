"""The table of ranks that ran without their peers (``launcher=trace`` with real tensors)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks.records.record import RankRecord, RunRecord, read_record
from benchmarks.report import words
from benchmarks.report.table import Column, Table, table

_HEADS = (
    Column("model", "model", is_key=True),
    Column("cluster", "cluster", is_key=True),
    Column("num_gpus", "ranks", form=words.count, is_key=True),
    Column("global_batch", "batch", form=words.count, is_key=True),
    Column("contender", "contender", is_key=True),
    Column("layout", "layout"),
)
_COLUMNS = (
    *_HEADS,
    Column("rank", "rank", form=words.count),
    Column("lone_step_s", "step without peers [s]", form=words.seconds),
    Column("compute_over_kernels", "compute over kernels", form=words.seconds),
    Column("host_bound", "host-bound", form=words.share),
    Column("gathers_beside_compute", "gathers beside compute", form=words.share),
    Column("allocated_gib", "allocated [GiB]", form=words.gib),
    Column("reserved_gib", "reserved [GiB]", form=words.gib),
)


def lone_table(rows: pd.DataFrame) -> Table:
    """One line per lone rank: its step, compute and memory; cells for which a CPU has no number
    are empty."""
    lone = rows[rows["is_lone"]]
    names = [column.name for column in _HEADS]
    lines = [
        {name: row[name] for name in names} | line | {"records": row["record_id"]}
        for row in lone.to_dict("records")
        for line in _lines(read_record(Path(row["path"])))
    ]
    data = pd.DataFrame(lines, columns=None if lines else [*names, "records"])
    return table("lone_ranks", "Ranks without their peers", _COLUMNS, data.set_index("records"))


def _lines(record: RunRecord) -> Iterator[dict[str, Any]]:
    found, ranks = record.predicted, {rank.rank: rank for rank in record.ranks}
    for rank, steps, sums in zip(
        found["ranks"], found["lone_step_s"], found["kernels"], strict=True
    ):
        yield {
            "rank": rank,
            "lone_step_s": statistics.median(steps) if steps else math.nan,
            "compute_over_kernels": _share(sums, "compute_s", "kernels_s"),
            "host_bound": _share(sums, "host_bound_s", "step_s"),
            "gathers_beside_compute": _share(sums, "gather_beside_compute_s", "gather_s"),
            **_memory(ranks[rank]),
        }


def _share(sums: dict[str, float], part: str, whole: str) -> float:
    return sums[part] / sums[whole] if sums.get(whole) else math.nan


def _memory(rank: RankRecord) -> dict[str, float]:
    peaks = {"allocated": rank.peak_allocated_bytes, "reserved": rank.peak_reserved_bytes}
    return {
        f"{kind}_gib": math.nan if peak is None else peak / 2**30 for kind, peak in peaks.items()
    }
