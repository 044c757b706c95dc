"""The table of a paper: one row per model size and GPU count, one group of columns per contender.

It takes the rows of ``latest_ok`` and shows every contender in its fastest configuration that ran.
A table mixes neither kinds of evidence nor bases of comparison nor clusters, so there is one grid
for each; the numbers of all are one tidy table, with one line per cell and contender.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from benchmarks.report import DEFAULTS, Options, style
from benchmarks.report.frame import CELL, best_or_failed
from benchmarks.report.speedup import SUBJECT, speedup_of
from benchmarks.report.table import MISSING, Column, Grid, Table, TextCell, table

_KINDS = {
    "allocated": "the allocator's peak",
    "resident": "resident memory above the start",
    "predicted": "predicted",
}


@dataclass(frozen=True)
class _Metric:
    """One column of a contender's group; ``best`` chooses the value that is set in bold."""

    name: str
    head: str
    form: style.Form
    best: Any = max


_METRICS = (
    _Metric("model_tflops_per_gpu", "TFLOP/s", style.tflops),
    _Metric("mfu", "MFU", style.share),
    _Metric("tokens_per_s_per_gpu", "tokens/s", style.tokens),
    _Metric("peak_gib", "GiB", style.gib, min),
    _Metric("speedup", "speed-up", style.ratio),
)
_KEYS = {
    "model": Column("model", "model", is_key=True),
    "num_gpus": Column("num_gpus", "GPUs", form=style.count, is_key=True),
    "cluster": Column("cluster", "cluster", is_key=True),
    "global_batch": Column("global_batch", "batch", form=style.count, is_key=True),
    "seq": Column("seq", "sequence", form=style.count, is_key=True),
    "precision": Column("precision", "precision", is_key=True),
}
_ALWAYS = ("model", "num_gpus")
_COLUMNS = (
    *_KEYS.values(),
    Column("parameters", "parameters", form=style.count),
    Column("evidence", "evidence"),
    Column("basis", "basis"),
    Column("contender", "contender"),
    Column("label", "label"),
    Column("default_degrees", "default degrees"),
    Column("layout", "layout"),
    Column("status", "status"),
    Column("reason", "reason"),
    *(Column(m.name, m.head, form=m.form, interval=m.name != "peak_gib") for m in _METRICS),
    Column("memory_kind", "kind of peak"),
    Column("unsure", "unsure"),
    Column("base", "base"),
    Column("record_id", "record"),
)


def paper_table(rows: pd.DataFrame, options: Options = DEFAULTS) -> Table:
    """The numbers of the paper's table, one line per cell and contender; ``paper_grids`` makes its
    text."""
    chosen, base = best_or_failed(rows), options.base
    bases = {
        tuple(row[key] for key in CELL): row
        for row in chosen[chosen["contender"] == base].to_dict("records")
    }
    lines = []
    for row in chosen.to_dict("records"):
        reference = bases.get(tuple(row[key] for key in CELL))
        pair = {"speedup": math.nan} if reference is None else speedup_of(row, reference)
        lines.append(row | pair | {"base": base, "label": style.contender_label(row["contender"])})
    data = pd.DataFrame(lines, columns=None if lines else [*chosen.columns])
    return table("paper", "Comparison", _COLUMNS, data)


def paper_grids(paper: Table) -> Iterator[Grid]:
    """The text of the paper's table: one grid per kind of evidence, basis and cluster."""
    groups = paper.data.groupby(["evidence", "basis", "cluster"], sort=True)
    for number, ((evidence, basis, _), mine) in enumerate(groups):
        name = "paper" if number == 0 else f"paper_{number + 1}"
        yield _grid(name, ", ".join(filter(None, (str(evidence), str(basis)))), mine)


def _grid(name: str, evidence: str, mine: pd.DataFrame) -> Grid:
    base = str(mine["base"].iloc[0])
    speeds = (
        mine.groupby("contender")["tokens_per_s_per_gpu"].mean().fillna(0.0)
    )  # the fastest first
    contenders = sorted(speeds.index, key=lambda name: (name != SUBJECT, -speeds[name]))
    keys = [key for key in _KEYS if key in _ALWAYS or _varies(mine, key)]
    groups = {name: _metrics(mine, name, base) for name in contenders}
    cells: dict[tuple[Any, ...], dict[str, Mapping[Any, Any]]] = {}
    for row in mine.to_dict("records"):  # once, because pandas takes long for every call
        cells.setdefault(tuple(row[key] for key in CELL), {})[row["contender"]] = row
    lines = [_line(cell, keys, groups) for cell in cells.values()]
    worker = style.worker_word(mine)
    cluster = style.cluster_label(mine["cluster"].iloc[0])
    heads = [f"{worker}s" if key == "num_gpus" else _KEYS[key].head for key in keys]
    metrics = [metric for group in groups.values() for metric in group]
    return Grid(
        name=name,
        title=f"Throughput and peak memory on {cluster}, {evidence}",
        caption=_caption(mine, evidence, keys=keys, worker=worker, base=base),
        heads=(*heads, *(metric.head for metric in metrics)),
        numeric=(*(_KEYS[key].form is not None for key in keys), *(True for _ in metrics)),
        rows=tuple(cells for cells, _ in lines),
        records=tuple(records for _, records in lines),
        groups=(("", len(keys)), *((style.contender_label(c), len(g)) for c, g in groups.items())),
        keys=len(keys),
        notes=_notes(mine),
    )


def _varies(mine: pd.DataFrame, key: str) -> bool:
    """Whether rows need a column for this key. They do not if the key follows from the model, as a
    sequence length may; then it is in the caption."""
    groups = mine.groupby("model")[key] if key == "seq" else mine.groupby("evidence")[key]
    return bool((groups.nunique() > 1).any())


def _told(mine: pd.DataFrame, key: str) -> str:
    """The caption's words for a key without a column."""
    if key == "seq" and mine["seq"].nunique() > 1:
        pairs = mine.drop_duplicates("model")[["model", "seq"]].itertuples(index=False)
        return "sequence " + ", ".join(f"{n} ({style.model_label(str(m))})" for m, n in pairs)
    return f"{_KEYS[key].head} {_key_cell(key, mine[key].iloc[0]).text}"


def _metrics(mine: pd.DataFrame, contender: str, base: str) -> list[_Metric]:
    """The columns of one contender: those with a value in any row; the base has no speed-up."""
    known = [m for m in _METRICS if mine[m.name].notna().any()]
    return [m for m in known if m.name != "speedup" or contender != base] or [_METRICS[2]]


def _line(
    cell: Mapping[str, Mapping[Any, Any]], keys: list[str], groups: dict[str, list[_Metric]]
) -> tuple[tuple[TextCell, ...], tuple[str, ...]]:
    """One line of the table from the rows of a cell by contender, and the records from which it was
    made."""
    best = {metric.name: _best(metric, cell.values()) for metric in _METRICS}
    first = next(iter(cell.values()))
    cells = [_key_cell(key, first[key]) for key in keys]
    for contender, metrics in groups.items():
        row = cell.get(contender)
        if row is None:
            cells += [TextCell(MISSING) for _ in metrics]
        elif row["status"] != "ok":
            cells += [TextCell(style.status_label(row["status"]))] + [TextCell(MISSING)] * (
                len(metrics) - 1
            )
        else:
            cells += [_metric_cell(row, metric, best[metric.name]) for metric in metrics]
    order = [cell[name]["record_id"] for name in groups if name in cell]
    return tuple(cells), tuple(map(str, order))


def _key_cell(key: str, value: Any) -> TextCell:
    labels = {"model": style.model_label, "cluster": style.cluster_label}
    if key in labels:
        return TextCell(labels[key](value))
    return TextCell(str(value), sort=float(value) if _KEYS[key].form else None)


def _metric_cell(row: Mapping[Any, Any], metric: _Metric, best: str) -> TextCell:
    value = row[metric.name]
    if style.is_missing(value):
        return TextCell(MISSING)
    text = metric.form(value)
    mark = "~" if metric.name == "speedup" and row["unsure"] is True else ""
    return TextCell(mark + text, bold=text == best, sort=float(value))


def _best(metric: _Metric, rows: Iterable[Mapping[Any, Any]]) -> str:
    """The best value of a line, as text; empty if there is only one value, or if the peaks are of
    different kinds."""
    fine = [row for row in rows if row["status"] == "ok" and not style.is_missing(row[metric.name])]
    kinds = {row["memory_kind"] for row in fine if not style.is_missing(row["memory_kind"])}
    if len(fine) < 2 or (metric.name == "peak_gib" and len(kinds) > 1):
        return ""
    return metric.form(metric.best(row[metric.name] for row in fine))


def _caption(mine: pd.DataFrame, evidence: str, *, keys: list[str], worker: str, base: str) -> str:
    """The caption: kind of evidence, units, keys that never vary, and contenders that nobody
    tuned."""
    told = [_told(mine, key) for key in _KEYS if key not in keys]
    kinds = [_KINDS.get(kind, kind) for kind in dict.fromkeys(mine["memory_kind"]) if kind]
    parts = [f"{evidence.capitalize()}"]
    if mine["tokens_per_s_per_gpu_low"].notna().any():
        parts[0] += ", medians of timed steps"
    if told:
        parts.append("all rows: " + ", ".join(told))
    parts.append(
        f"TFLOP/s (of the model), MFU and tokens/s are per {worker}"
        if mine["mfu"].notna().any()
        else f"TFLOP/s and tokens/s are per {worker}"
    )
    if kinds:
        parts.append(f"GiB: peak of the fullest {worker} ({' or '.join(kinds)})")
    if mine["speedup"].notna().any():
        parts.append(f"speed-up over {style.contender_label(base)}; bold: best of the line")
    if mine["unsure"].eq(True).any():
        parts.append("~: not settled by its samples")
    names = dict.fromkeys(mine[mine["default_degrees"].eq(True)]["contender"])
    labels = ", ".join(map(style.contender_label, names))
    return "; ".join(parts) + "." + (f" Default degrees, not tuned: {labels}." if labels else "")


def _notes(mine: pd.DataFrame) -> tuple[str, ...]:
    """The reasons of lines without a number, each reason once."""
    failed = mine[mine["status"] != "ok"]
    reasons: dict[str, list[str]] = {}
    for row in failed.itertuples():
        who = f"{style.model_label(str(row.model))} on {row.num_gpus}, {row.label}"
        reasons.setdefault(f"{style.status_label(str(row.status))}: {row.reason}", []).append(who)
    return tuple(
        f"{reason} ({'; '.join(who[:4])}{f' and {len(who) - 4} more' if len(who) > 4 else ''})."
        for reason, who in reasons.items()
    )
