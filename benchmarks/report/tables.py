"""The tables of a comparison: throughput, memory, speed-up, evidence, and all of them by name."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from benchmarks.records.metrics import paired_ratio
from benchmarks.records.record import RankRecord, RunRecord, read_record
from benchmarks.report import style
from benchmarks.report.ablation import ablation_table
from benchmarks.report.charts import Picture
from benchmarks.report.frame import CELL
from benchmarks.report.headline import BASE, paired_speedups
from benchmarks.report.paper import paper_table
from benchmarks.report.published import published_table
from benchmarks.report.table import Column, Table, key_columns, table

# The table of ranks that ran without their peers (``launcher=trace`` with real tensors).


_HEADS = (
    Column("model", "model", is_key=True),
    Column("cluster", "cluster", is_key=True),
    Column("num_gpus", "ranks", form=style.count, is_key=True),
    Column("global_batch", "batch", form=style.count, is_key=True),
    Column("contender", "contender", is_key=True),
    Column("layout", "layout"),
)
_COLUMNS = (
    *_HEADS,
    Column("rank", "rank", form=style.count),
    Column("lone_step_s", "step without peers [s]", form=style.seconds),
    Column("compute_over_kernels", "compute over kernels", form=style.seconds),
    Column("host_bound", "host-bound", form=style.share),
    Column("gathers_beside_compute", "gathers beside compute", form=style.share),
    Column("allocated_gib", "allocated [GiB]", form=style.gib),
    Column("reserved_gib", "reserved [GiB]", form=style.gib),
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


# How far kinds of evidence (measured, traced, simulated) differ for the same configuration.


_TRUST = [  # from the most trusted kind; the first that a configuration has is its reference
    "measured",
    "traced with real tensors",
    "traced",
    "published",
    "simulated with traced compute",
    "simulated",
]
_QUANTITIES = {"step_s": "step [s]", "peak_gib": "peak memory [GiB]"}
_SAME = [key for key in CELL if key != "evidence"]
_NAMES = [*_SAME, "contender", "layout", "quantity", "value", "kind", "reference"]
_NAMES += ["reference_kind", "error", "records"]
MAX_LINES = 40


def evidence_distances(rows: pd.DataFrame) -> pd.DataFrame:
    """One row per configuration, quantity and kind of evidence except for the most trusted one.

    ``error`` is value / reference - 1, where the reference is the most trusted kind of evidence.
    For memory, a kind of evidence also names its kind of peak, because these differ: ``resident``
    is more than tensors.
    """
    fine = rows[rows["status"] == "ok"]
    same = [*_SAME, "contender", "layout"]
    fine = fine[fine.groupby(same)["evidence"].transform("nunique") > 1]
    lines = []
    for keys, group in fine.groupby(same, sort=True):
        group = group.sort_values("evidence", key=lambda kinds: kinds.map(_TRUST.index))
        named = dict(zip(same, keys, strict=True))
        for quantity, label in _QUANTITIES.items():
            known = group[group[quantity].notna()]
            lines += [
                named | {"quantity": label} | _distance(known.iloc[0], other, quantity)
                for _, other in known.iloc[1:].iterrows()
            ]
    return pd.DataFrame(lines, columns=_NAMES)


def _distance(reference: pd.Series, other: pd.Series, quantity: str) -> dict[str, object]:
    return {
        "value": other[quantity],
        "kind": _kind(other, quantity),
        "reference": reference[quantity],
        "reference_kind": _kind(reference, quantity),
        "error": other[quantity] / reference[quantity] - 1.0,
        "records": f"{other['record_id']} {reference['record_id']}",
    }


def _kind(row: pd.Series, quantity: str) -> str:
    memory = quantity == "peak_gib" and row["memory_kind"] != "predicted"
    return f"{row['evidence']} ({row['memory_kind']})" if memory else str(row["evidence"])


def evidence_distance_figure(rows: pd.DataFrame) -> Iterator[Picture]:
    """Signed distances in per cent, with one line per configuration and one panel per quantity."""
    distances = evidence_distances(rows)
    if distances.empty:
        return
    yield Picture(
        section="Evidence",
        name="evidence_distance",
        caption="How far one kind of evidence is from a more trusted one on the same configuration "
        "(value / reference - 1); the worst of each quantity are shown.",
        figure=_lollipops(distances),
    )


def _lollipops(distances: pd.DataFrame) -> Figure:
    groups = list(distances.groupby("quantity", sort=True))
    lines = [min(MAX_LINES, len(group)) + 1.5 for _, group in groups]
    height = 0.4 + 0.36 * sum(lines) / len(lines)
    figure, axes = style.panels(len(groups), columns=1, width=8.0, height=height, heights=lines)
    for axis, (quantity, group) in zip(axes, groups, strict=True):
        worst = group.reindex(group["error"].abs().sort_values().index)[-MAX_LINES:]
        labels = [
            f"{style.model_label(str(r.model))}, {r.num_gpus} ranks, "
            f"{style.contender_label(str(r.contender))} {r.layout}\n"
            f"{r.kind} against {r.reference_kind}"
            for r in worst.itertuples()
        ]
        places, errors = np.arange(len(worst)), 100 * worst["error"].to_numpy(dtype=float)
        colours = [style.colour(name) for name in worst["contender"]]
        axis.hlines(places, 0, errors, color=colours, linewidth=2)
        axis.scatter(errors, places, color=colours, zorder=3)
        for place, error in zip(places, errors, strict=True):
            axis.annotate(
                f"{error:+.1f} %",
                (error, place),
                xytext=(6 if error >= 0 else -6, 0),
                textcoords="offset points",
                va="center",
                ha="left" if error >= 0 else "right",
                fontsize=8,
            )
        axis.axvline(0, color="#333333", linewidth=0.8)
        axis.set_yticks(places, labels, fontsize=8)
        axis.set_ylim(-0.6, len(worst) - 0.4)
        axis.margins(x=0.2)
        axis.set_xlabel(f"distance of the {str(quantity).split(' [')[0]} [%]")
    return figure


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
    worker = style.worker_word(rows)
    columns = (
        *key_columns(rows),
        Column("layout", "layout"),
        Column("step_s", "step [s]", form=style.seconds, interval=True, instead="shown_status"),
        Column("tokens_per_s_per_gpu", f"tokens/s/{worker}", form=style.tokens, interval=True),
        Column("model_tflops_per_gpu", f"model TFLOP/s/{worker}", form=style.tflops),
        Column("mfu", "MFU", form=style.share),
        Column("note", "note"),
    )
    data = rows.assign(
        note=[_note(row, _usual_code(rows)) for row in rows.to_dict("records")],
        shown_status=[style.status_label(s) if s != "ok" else "–" for s in rows["status"]],
    )
    return table("throughput", "Throughput", columns, _named(data, data["record_id"]))


def memory_table(rows: pd.DataFrame) -> Table:
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
    return table("memory", "Memory", columns, _named(data, data["record_id"]))


def speedup_table(rows: pd.DataFrame, base: str = BASE) -> Table:
    """The table of speed-ups of each contender's fastest configuration over the base's in the same
    cell, with the geometric mean over cells per kind of evidence and cluster."""
    pairs = paired_speedups(rows, base)
    columns = (
        *key_columns(pairs),
        Column("speedup", "speed-up", form=style.ratio, interval=True, unsure="unsure"),
        Column("memory_ratio", "peak memory ratio", form=style.ratio),
        Column("doubts", "note"),
    )
    over = style.contender_label(base)
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
