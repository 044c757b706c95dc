"""The tables of throughput, of memory, and of ranks that ran without their peers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks.records.record import RankRecord, RunRecord, read_record
from benchmarks.report import DEFAULTS, Options, style
from benchmarks.report.table import Column, Table, key_columns, table


def throughput_table(rows: pd.DataFrame, options: Options = DEFAULTS) -> Table:
    """The table of median step times and throughput with 95 % intervals, or the reason of a
    failure."""
    worker = style.worker_word(rows)
    columns = (
        *key_columns(rows),
        Column("layout", "layout"),
        Column("step_s", "step [s]", form=style.seconds, interval=True, instead="status"),
        Column("tokens_per_s_per_gpu", f"tokens/s/{worker}", form=style.tokens, interval=True),
        Column("model_tflops_per_gpu", f"model TFLOP/s/{worker}", form=style.tflops),
        Column("mfu", "MFU", form=style.share),
        Column("note", "note"),
    )
    known = rows.loc[rows["code"] != "", "code"]
    usual = "" if known.empty else str(known.mode().iloc[0])  # the files that most rows ran with
    data = rows.assign(note=[_note(row, usual) for row in rows.to_dict("records")])
    return table("throughput", "Throughput", columns, data)


def memory_table(rows: pd.DataFrame, options: Options = DEFAULTS) -> Table:
    """The table of peak memory of the fullest rank, with the kind of peak and, where records have
    it, the cost model's prediction for the plan's tensors."""
    rows = rows[rows["peak_gib"].notna()]
    columns = (
        *key_columns(rows),
        Column("layout", "layout"),
        Column("peak_gib", f"peak of the fullest {style.worker_word(rows)} [GiB]", form=style.gib),
        Column("memory_kind", "kind of peak", is_key=True),
        Column("predicted_gib", "tensors by the cost model [GiB]", form=style.gib),
        Column("memory_limit_gib", "device limit [GiB]", form=style.gib, is_key=True),
        Column("note", "note"),
    )
    over = rows["peak_gib"] > rows["memory_limit_gib"]
    data = rows.assign(note=["over the device" if is_over else "" for is_over in over])
    return table("memory", "Memory", columns, data)


def _note(row: Mapping[Any, Any], usual_code: str) -> str:
    if row["status"] != "ok":
        return str(row["reason"])
    notes = ["default degrees"] if row["default_degrees"] is True else []
    if row["unstable"] is True:
        notes.append(f"unstable: spread {row['spread']:.0%}, n={len(row['samples_step_s'])}")
    if row["code"] not in ("", usual_code):
        notes.append("other version of the suite's files than most rows")
    return "; ".join(notes)


_LONE = (
    Column("layout", "layout"),
    Column("rank", "rank", form=style.count),
    Column("lone_step_s", "step without peers [s]", form=style.seconds),
    Column("compute_over_kernels", "compute over kernels", form=style.seconds),
    Column("host_bound", "host-bound", form=style.share),
    Column("gathers_beside_compute", "gathers beside compute", form=style.share),
    Column("allocated_gib", "allocated [GiB]", form=style.gib),
    Column("reserved_gib", "reserved [GiB]", form=style.gib),
)


def lone_table(rows: pd.DataFrame, options: Options = DEFAULTS) -> Table:
    """One line per lone rank: its step, compute and memory; cells for which a CPU has no number
    are empty."""
    keys = [c for c in key_columns(rows) if c.name not in ("seq", "precision", "evidence", "basis")]
    names = [*(column.name for column in keys), "layout", "record_id"]
    lines = [
        {name: row[name] for name in names} | line
        for row in rows[rows["is_lone"]].to_dict("records")
        for line in _lines(read_record(Path(row["path"])))
    ]
    data = pd.DataFrame(lines, columns=None if lines else names)
    return table("lone_ranks", "Ranks without their peers", (*keys, *_LONE), data)


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
