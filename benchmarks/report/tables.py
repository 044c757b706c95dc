"""The tables of a comparison: throughput, memory, speed-up, evidence, and all of them by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pandas as pd

from benchmarks.records.stats import paired_ratio
from benchmarks.report import words
from benchmarks.report.ablation import ablation_table
from benchmarks.report.evidence import evidence_distances
from benchmarks.report.lone import lone_table
from benchmarks.report.pairs import BASE, paired_speedups
from benchmarks.report.paper import paper_table
from benchmarks.report.published import published_table
from benchmarks.report.table import Column, Table, key_columns, table


def comparison_tables(rows: pd.DataFrame, base: str = BASE) -> dict[str, Table]:
    """The tables of ``latest_ok`` rows by name, the paper's first.

    The index of a row names the records from which it was made; for speed-ups and distances the
    base's come after its own.
    """
    return {name: make(rows, base) for name, make in _MAKERS.items()}


def comparison_table(name: str, rows: pd.DataFrame, base: str = BASE) -> Table:
    """One of the ``comparison_tables``, without the work for the others."""
    return _MAKERS[name](rows, base)


def throughput_table(rows: pd.DataFrame) -> Table:
    """The table of median step times and throughput with 95 % intervals, or the reason of a
    failure."""
    worker = words.worker_word(rows)
    columns = (
        *key_columns(rows),
        Column("layout", "layout"),
        Column("step_s", "step [s]", form=words.seconds, interval=True, instead="shown_status"),
        Column("tokens_per_s_per_gpu", f"tokens/s/{worker}", form=words.tokens, interval=True),
        Column("model_tflops_per_gpu", f"model TFLOP/s/{worker}", form=words.tflops),
        Column("mfu", "MFU", form=words.share),
        Column("note", "note"),
    )
    data = rows.assign(
        note=[_note(row, _usual_code(rows)) for row in rows.to_dict("records")],
        shown_status=[words.status_label(s) if s != "ok" else "–" for s in rows["status"]],
    )
    return table("throughput", "Throughput", columns, _named(data, data["record_id"]))


def memory_table(rows: pd.DataFrame) -> Table:
    """The table of peak memory of the fullest rank, with the kind of peak and, where records have
    it, the cost model's prediction for the plan's tensors."""
    rows = rows[rows["peak_gib"].notna()]
    columns = (
        *key_columns(rows),
        Column("layout", "layout"),
        Column("peak_gib", f"peak of the fullest {words.worker_word(rows)} [GiB]", form=words.gib),
        Column("memory_kind", "kind of peak", is_key=True),
        Column("predicted_gib", "tensors by the cost model [GiB]", form=words.gib),
        Column("memory_limit_gib", "device limit [GiB]", form=words.gib, is_key=True),
        Column("note", "note"),
    )
    over = rows["peak_gib"] > rows["memory_limit_gib"]
    data = rows.assign(note=["over the device" if is_over else "" for is_over in over])
    return table("memory", "Memory", columns, _named(data, data["record_id"]))


def speedup_table(rows: pd.DataFrame, base: str = BASE) -> Table:
    """The table of speed-ups of each contender's fastest configuration over the base's in the same
    cell, with the geometric mean over cells per kind of evidence and cluster."""
    pairs = paired_speedups(rows, base)
    columns = (
        *key_columns(pairs),
        Column("speedup", "speed-up", form=words.ratio, interval=True, unsure="unsure"),
        Column("memory_ratio", "peak memory ratio", form=words.ratio),
        Column("doubts", "note"),
    )
    over = words.contender_label(base)
    caption = f"Each contender's fastest configuration over the fastest of {over} in the same cell."
    grouped = pairs.groupby(["evidence", "basis", "cluster", "contender"], sort=True)
    means = [
        dict(zip(("evidence", "basis", "cluster", "contender"), keys, strict=True))
        | _mean_of(group)
        for keys, group in grouped
        if len(group) > 1
    ]
    data = _named(pairs, pairs["records"])
    if means:
        data = pd.concat([data, _named(pd.DataFrame(means), pd.Series([""] * len(means)))])
    return table("speedup", f"Speed-up over {over}", columns, data, caption=caption)


def _mean_of(group: pd.DataFrame) -> dict[str, object]:
    mean, unsure = paired_ratio(list(group["speedup"])), int(group["unsure"].sum())
    measured = group["evidence"].iloc[0] == "measured"
    return {
        "model": f"mean of {len(group)} cells",
        "speedup": mean.median,
        "speedup_low": mean.low if measured else None,
        "speedup_high": mean.high if measured else None,
        "unsure": 2 * unsure > len(group),
        "doubts": "geometric mean of the pairs, interval over the pairs"
        + (f"; {unsure} of them unsure" if unsure else ""),
    }


def evidence_table(rows: pd.DataFrame) -> Table:
    """The table of distances between the kinds of evidence of one configuration."""
    distances = evidence_distances(rows)
    columns = (
        *(c for c in key_columns(rows) if c.name not in ("evidence", "basis")),
        Column("layout", "layout"),
        Column("quantity", "quantity"),
        Column("value", "this", form=_figures),
        Column("kind", "kind of this"),
        Column("reference", "reference", form=_figures),
        Column("reference_kind", "kind of the reference"),
        Column("error", "distance", form=_signed),
    )
    records = distances["records"] if len(distances) else pd.Series(dtype=str)
    return table("evidence", "Kinds of evidence", columns, _named(distances, records))


def _figures(value: float) -> str:
    return f"{value:.4g}"


def _signed(value: float) -> str:
    return f"{value:+.1%}"


def _named(data: pd.DataFrame, records: pd.Series) -> pd.DataFrame:
    """The rows with an index that names their records."""
    return data.set_axis(records.astype(str).to_list())


def _usual_code(rows: pd.DataFrame) -> str:
    """The digest of the suite's files that most rows ran with; empty if none is known."""
    known = rows.loc[rows["code"] != "", "code"]
    return "" if known.empty else str(known.mode().iloc[0])


def _note(row: Mapping[Any, Any], usual_code: str) -> str:
    if row["status"] != "ok":
        return str(row["reason"])
    notes = ["default degrees"] if row["default_degrees"] is True else []
    if row["unstable"] is True:
        notes.append(f"unstable: spread {row['spread']:.0%}, n={len(row['samples_step_s'])}")
    if row["code"] not in ("", usual_code):
        notes.append("other version of the suite's files than most rows")
    return "; ".join(notes)


_MAKERS: dict[str, Callable[[pd.DataFrame, str], Table]] = {
    "paper": paper_table,
    "ablation": lambda rows, base: ablation_table(rows),
    "throughput": lambda rows, base: throughput_table(rows),
    "memory": lambda rows, base: memory_table(rows),
    "speedup": speedup_table,
    "evidence": lambda rows, base: evidence_table(rows),
    "published": lambda rows, base: published_table(rows),
    "lone_ranks": lambda rows, base: lone_table(rows),
}
