"""The tables of throughput, of memory, and that of a paper.

They take the rows of ``latest_ok``. The paper's table has one row per model size and GPU count and
one group of columns per contender, in its fastest configuration that ran. A table of a paper mixes
neither kinds of evidence nor bases of comparison nor clusters, so there is one grid for each; the
numbers of all are one tidy table, with one line per cell and contender.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from benchmarks import CHECKOUT
from benchmarks.report import DEFAULTS, Options, display
from benchmarks.report.frame import CELL, best_or_failed
from benchmarks.report.speedup import SPEEDUP, SUBJECT, speedup_of, with_speedups
from benchmarks.report.table import MISSING, Column, Grid, Table, TextCell, key_columns, table
from benchmarks.specification import SpecError
from benchmarks.specification.contenders import ROWS


def throughput_table(rows: pd.DataFrame, options: Options = DEFAULTS) -> Table:
    """The table of median step times and throughput with 95 % intervals, or the reason of a
    failure."""
    worker, flops = display.worker_word(rows), display.flops_unit(rows["model_tflops_per_gpu"])
    columns = (
        *key_columns(rows),
        Column("layout", "layout"),
        Column("step_s", "step [s]", form=display.seconds, interval=True, instead="status"),
        Column("tokens_per_s_per_gpu", f"tokens/s/{worker}", form=display.tokens, interval=True),
        Column("model_tflops_per_gpu", f"model {flops.name}/{worker}", form=flops.form),
        Column("mfu", "MFU", form=display.share),
        Column("note", "note"),
    )
    notes = [_note(row) for row in rows.to_dict("records")]
    return table("throughput", "Throughput", columns, rows.assign(note=notes))


def memory_table(rows: pd.DataFrame, options: Options = DEFAULTS) -> Table:
    """The table of peak memory of the fullest rank, with the kind of peak and, where records have
    it, the cost model's prediction for the plan's tensors."""
    rows = rows[rows["peak_gib"].notna()]
    worker, limit = display.worker_word(rows), display.memory_unit(rows["memory_limit_gib"])
    unit = display.memory_unit([*rows["peak_gib"], *rows["predicted_gib"]])
    columns = (
        *key_columns(rows),
        Column("layout", "layout"),
        Column("peak_gib", f"peak of the fullest {worker} [{unit.name}]", form=unit.form),
        Column("memory_kind", "kind of peak", is_key=True),
        Column("predicted_gib", f"tensors by the cost model [{unit.name}]", form=unit.form),
        Column("memory_limit_gib", f"device limit [{limit.name}]", form=limit.form, is_key=True),
        Column("note", "note"),
    )
    over = rows["peak_gib"] > rows["memory_limit_gib"]
    notes = ["over the device" if is_over else "" for is_over in over]
    return table("memory", "Memory", columns, rows.assign(note=notes))


def _note(row: Mapping[Any, Any]) -> str:
    if row["status"] != "ok":
        return str(row["reason"])
    notes = ["default degrees"] if row["default_degrees"] is True else []
    if row["steps_unsettled"]:
        notes.append(f"unsettled: {row['steps_unsettled']}")
    if others := len(row["unsuccessful"]):
        notes.append(f"{others} other attempt{'s' * (others > 1)} did not succeed")
    return "; ".join(notes)


def attempts_table(rows: pd.DataFrame, options: Options = DEFAULTS) -> Table:
    """The attempts that did not succeed at configurations which the other tables show by another
    attempt."""
    keys = key_columns(rows)
    names = [*(column.name for column in keys), "layout"]
    lines = [
        {name: row[name] for name in names} | attempt
        for row in rows.to_dict("records")
        for attempt in row["unsuccessful"]
    ]
    columns = (
        *keys,
        Column("layout", "layout"),
        Column("status", "status"),
        Column("ended_at", "ended"),
        Column("reason", "reason"),
    )
    data = pd.DataFrame(lines, columns=None if lines else names)
    caption = "Attempts that did not succeed, of configurations that other tables show by another."
    return table("attempts", "Other attempts", columns, data, caption=caption)


_KINDS = {
    "allocated": "the allocator's peak",
    "resident": "resident memory above the start",
    "predicted": "predicted",
}


_KEYS = ("model", "num_gpus", "cluster", "global_batch", "seq", "precision")
# ``Options.columns`` chooses among these columns of the paper's table; others are empty then.
_CHOSEN = ("model_tflops_per_gpu", "mfu", "tokens_per_s_per_gpu", "peak_gib", "speedup")
_ALWAYS = ("model", "num_gpus")
_WITH_INTERVALS = ("model_tflops_per_gpu", "mfu", "tokens_per_s_per_gpu", "speedup")
_COLUMNS = (
    Column("parameters", "parameters", form=display.count),
    Column("evidence", "evidence"),
    Column("basis", "basis"),
    Column("contender", "contender"),
    Column("label", "label"),
    Column("default_degrees", "default degrees"),
    Column("layout", "layout"),
    Column("status", "status"),
    Column("reason", "reason"),
    *(Column(name, name, interval=True) for name in _WITH_INTERVALS),
    Column("peak_gib", "GiB"),
    Column("memory_kind", "kind of peak"),
    Column("speedup_unsettled", "unsettled"),
    Column("base", "base"),
    Column("record_id", "record"),
)


def paper_table(rows: pd.DataFrame, options: Options = DEFAULTS) -> Table:
    """The numbers of the paper's table, one line per cell and contender; ``paper_grids`` makes its
    text."""
    compared = with_speedups(best_or_failed(rows), options.base)
    if options.contenders:
        _check("contenders", options.contenders, set(compared["contender"]))
        compared = compared[compared["contender"].isin(options.contenders)]
    if options.columns:
        _check("columns", options.columns, _CHOSEN)
        hidden = set(_CHOSEN) - set(options.columns)
        ends = {f"{name}{end}" for name in hidden for end in ("", "_low", "_high")}
        compared = compared.assign(**dict.fromkeys(ends & {*compared}, math.nan))
    labels = compared["contender"].map(display.contender_label)
    return table(
        "paper",
        "Comparison",
        (*_key_columns(rows).values(), *_COLUMNS),
        compared.assign(base=options.base, label=labels),
    )


def _key_columns(rows: pd.DataFrame) -> dict[str, Column]:
    columns = {column.name: column for column in key_columns(rows)}
    return {name: columns[name] for name in (*_KEYS, *display.varied(rows))}


def _check(option: str, asked: Iterable[str], known: Iterable[str]) -> None:
    for name in asked:
        if name not in known:
            raise SpecError(f"--{option}={name}: there are {', '.join(sorted(known))}")


def paper_grids(paper: Table) -> Iterator[Grid]:
    """The text of the paper's table: one grid per kind of evidence, basis and cluster."""
    groups = paper.data.groupby(["evidence", "basis", "cluster"], sort=True)
    for number, ((evidence, basis, _), group) in enumerate(groups):
        name = "paper" if number == 0 else f"paper_{number + 1}"
        yield _grid(name, ", ".join(filter(None, (str(evidence), str(basis)))), group)


def _grid(name: str, evidence: str, rows: pd.DataFrame) -> Grid:
    base = str(rows["base"].iloc[0])
    speeds = rows.groupby("contender")["tokens_per_s_per_gpu"].mean().fillna(0.0)
    contenders = sorted(speeds.index, key=lambda name: (name != SUBJECT, -speeds[name]))
    # In the caption: keys that never vary, or follow from the model, as a sequence length may.
    keys, constant = list[Column](), list[Column]()
    for key, column in _key_columns(rows).items():
        values = rows.groupby("model" if key == "seq" else "evidence")[key].nunique(dropna=False)
        if key != "cluster":  # which the title names
            (keys if key in _ALWAYS or (values > 1).any() else constant).append(column)
    # The columns of a contender's group; the best value of a line is set in bold
    flops = display.flops_unit(rows["model_tflops_per_gpu"])
    memory = display.memory_unit(rows["peak_gib"])
    metrics = (
        Column("model_tflops_per_gpu", flops.name, form=flops.form),
        Column("mfu", "MFU", form=display.share),
        Column("tokens_per_s_per_gpu", "tokens/s", form=display.tokens),
        Column("peak_gib", memory.name, form=memory.form),
        replace(SPEEDUP, interval=False),
    )
    groups = {name: _group(metrics, rows, name, base) for name in contenders}
    cells: dict[tuple[Any, ...], dict[str, Mapping[Any, Any]]] = {}
    for row in rows.to_dict("records"):  # once, because pandas takes long for every call
        cells.setdefault(tuple(row[key] for key in CELL), {})[row["contender"]] = row
    lines = [_line(cell, keys, metrics, groups) for cell in cells.values()]
    cluster = display.cluster_label(rows["cluster"].iloc[0])
    shown = [*keys, *(metric for group in groups.values() for metric in group)]
    return Grid(
        name=name,
        title=f"Throughput and peak memory on {cluster}, {evidence}",
        caption=_caption(rows, constant=constant, metrics=metrics, base=base),
        heads=tuple(column.head for column in shown),
        numeric=tuple(column.form is not None for column in shown),
        rows=tuple(cells for cells, _ in lines),
        records=tuple(records for _, records in lines),
        groups=(
            ("", len(keys)),
            *((display.contender_label(c), len(g)) for c, g in groups.items()),
        ),
        keys=len(keys),
        notes=(*_notes(rows), *filter(None, [display.unchecked_note(rows)])),
    )


def _group(
    metrics: Sequence[Column], rows: pd.DataFrame, contender: str, base: str
) -> list[Column]:
    """The columns of one contender: those with a value in any row; the base has no speed-up."""
    known = [m for m in metrics if rows[m.name].notna().any()]
    return [m for m in known if m.name != "speedup" or contender != base] or [metrics[2]]


def _line(
    cell: Mapping[str, Mapping[Any, Any]],
    keys: Sequence[Column],
    metrics: Sequence[Column],
    groups: dict[str, list[Column]],
) -> tuple[tuple[TextCell, ...], tuple[str, ...]]:
    """One line of the table from the rows of a cell by contender, and the records from which it was
    made."""
    best = {metric.name: _best(metric, cell.values()) for metric in metrics}
    first = next(iter(cell.values()))
    cells = [key.cell(first) for key in keys]
    for contender, group in groups.items():
        row = cell.get(contender)
        if row is not None and row["status"] == "ok":
            for metric in group:
                made = metric.cell(row)
                bold = made.sort is not None and made.text.removeprefix("~") == best[metric.name]
                cells.append(replace(made, bold=bold))
            continue
        why = MISSING if row is None else display.status_label(row["status"])
        cells += [TextCell(why), *(TextCell(MISSING) for _ in group[1:])]
    return tuple(cells), tuple(str(cell[name]["record_id"]) for name in groups if name in cell)


def _best(metric: Column, rows: Iterable[Mapping[str, Any]]) -> str:
    """The best value of a line, as text; empty if there is only one value, if the peaks are of
    different kinds, or if it is not settled that the next contender is slower."""
    fine = [
        row for row in rows if row["status"] == "ok" and not display.is_missing(row[metric.name])
    ]
    kinds = {row["memory_kind"] for row in fine if not display.is_missing(row["memory_kind"])}
    is_memory = metric.name == "peak_gib"
    if len(fine) < 2 or (is_memory and len(kinds) > 1):
        return ""
    best, second, *_ = sorted(fine, key=lambda row: row[metric.name], reverse=not is_memory)
    if not is_memory and speedup_of(best, second)["speedup_unsettled"]:
        return ""
    return (metric.form or str)(best[metric.name])


def _caption(
    rows: pd.DataFrame,
    *,
    constant: Sequence[Column],
    metrics: Sequence[Column],
    base: str,
) -> str:
    """The caption: units, keys that never vary, and contenders that nobody
    tuned."""
    same = []
    for key in constant:
        text = key.cell({key.name: rows[key.name].iloc[0]}).text
        if key.name == "seq" and rows["seq"].nunique() > 1:  # each model has its own
            pairs = rows.drop_duplicates("model")[["model", "seq"]].itertuples(index=False)
            text = ", ".join(f"{seq} ({display.model_label(str(model))})" for model, seq in pairs)
        same.append(f"{key.head} {text}")
    kinds = [_KINDS.get(kind, kind) for kind in dict.fromkeys(rows["memory_kind"]) if kind]
    parts = ["medians of timed steps"] * bool(rows["tokens_per_s_per_gpu_low"].notna().any())
    if same:
        parts.append("all rows: " + ", ".join(same))
    worker, (flops, _, _, memory, _) = display.worker_word(rows), metrics
    words = {flops.name: f"{flops.head} (of the model)"}
    if rates := [words.get(m.name, m.head) for m in metrics[:3] if rows[m.name].notna().any()]:
        parts.append(f"per {worker}: {', '.join(rates)}")
    if kinds:
        parts.append(f"{memory.head}: peak of the fullest {worker} ({' or '.join(kinds)})")
    if rows["speedup"].notna().any():
        parts.append(
            f"speed-up over {display.contender_label(base)}; bold: best of the line, if settled"
        )
    if legend := display.unsettled(rows["speedup_unsettled"]):
        parts.append(legend)
    names = dict.fromkeys(rows[rows["default_degrees"].eq(True)]["contender"])
    labels = ", ".join(map(display.contender_label, names))
    told = "; ".join(parts)
    return f"{told[:1].upper()}{told[1:]}." + (
        f" Default degrees, not tuned: {labels}." if labels else ""
    )


def _notes(rows: pd.DataFrame) -> tuple[str, ...]:
    """The reasons of lines without a number, each reason once."""
    failed = rows[rows["status"] != "ok"]
    reasons: dict[str, list[str]] = {}
    for row in failed.itertuples():
        line = f"{display.model_label(str(row.model))} on {row.num_gpus}, {row.label}"
        reason = f"{display.status_label(str(row.status))}: {row.reason}"
        reasons.setdefault(reason, []).append(line)
    return tuple(
        f"{reason} ({'; '.join(lines[:4])}"
        + (f" and {len(lines) - 4} more)." if len(lines) > 4 else ").")
        for reason, lines in reasons.items()
    )


_PUBLISHED = CHECKOUT / "results" / "published"
_TABLES = ("megatron_sc21_table1.csv", "megatron_sc21_table2.csv")
_SAME = ["layers", "hidden", "num_gpus", "global_batch"]
_PAPERS = {"megatron_lm_2021": "Megatron-LM, published", "zero3_2021": "ZeRO-3, published"}


def _tenths(value: float) -> str:
    return f"{value:,.1f}" if value >= 0.1 else f"{value:.2g}"


_MADE_OF = (
    Column("cluster", "cluster", is_key=True),
    Column("parameters_b", "parameters [B]", form=_tenths),
    Column("heads", "heads", form=display.tokens),
    Column("hidden", "hidden", form=display.tokens),
    Column("layers", "layers", form=display.tokens),
    Column("num_gpus", "GPUs", form=display.tokens),
    Column("global_batch", "batch", form=display.tokens),
)
_SIZES = {f"model.{column.name}" for column in _MADE_OF}


_KEPT = ("plan", "setting", "gap")  # of every contender, in the files of numbers alone


def scaling_table(rows: pd.DataFrame, options: Options = DEFAULTS) -> Table:
    """One line per cell: the model's sizes, TFLOP/s per GPU of every contender at its fastest
    configuration, the fastest one's share of the peak and PFLOP/s of all GPUs, and the published
    TFLOP/s per GPU of the same model, GPUs and batch on A100."""
    lines: list[dict[str, Any]] = []
    for _, cell in best_or_failed(rows).groupby(CELL, sort=False, dropna=False):
        first, fastest = cell.iloc[0], cell.iloc[cell["model_tflops_per_gpu"].fillna(0.0).argmax()]
        sizes = first["source"]["spec"]["model"]
        line = {
            name: first[name] for name in ("evidence", "model", "cluster", "on_cpu", *_SAME[2:])
        }
        line |= {name: sizes.get(name, math.nan) for name in ("heads", "hidden", "layers")}
        line |= {name: first[name] for name in display.varied(rows) if name not in _SIZES}
        line |= dict(zip(cell["contender"], cell["model_tflops_per_gpu"], strict=True))
        for row in cell[cell["status"] == "ok"].to_dict("records"):
            plan, knobs = row["source"]["plan"], dict(row["knobs"])
            setting = {"microbatch_size": knobs.pop("microbatch_size"), "knobs": knobs}
            kept = (plan.get("words") or row["layout"], json.dumps(setting), plan.get("gap"))
            line |= {
                f"{row['contender']}_{name}": each for name, each in zip(_KEPT, kept, strict=True)
            }
        line |= {"mfu": fastest["mfu"], "parameters_b": first["parameters"] / 1e9}
        line["pflops"] = fastest["model_tflops_per_gpu"] * first["num_gpus"] / 1e3
        lines.append(line | _published(line))
    return as_table(pd.DataFrame(lines))


def _published(line: dict[str, Any]) -> dict[str, float]:
    if line["cluster"] != "a100":
        return {}
    table = published()
    own = table[(table[_SAME] == [line[name] for name in _SAME]).all(axis=1)]
    return dict(zip(own["program"], own["tflops"], strict=True))


def published() -> pd.DataFrame:
    """The paper's runs, with ``tflops`` of the model alone per GPU."""
    tables = [pd.read_csv(_PUBLISHED / name) for name in _TABLES]
    runs = pd.concat(tables, ignore_index=True)
    runs = runs[runs["metric"] == "hardware_tflops_per_gpu"]
    layers, hidden = runs["layers"], runs["hidden"]
    common = 1 + runs["seq"] / (6 * hidden)
    head = runs["vocab"] / (layers * hidden)
    share = 72 * (common + head / 12) / (96 * (common + head / 16))
    return runs.assign(tflops=runs["value"].astype(float) * share)


def as_table(data: pd.DataFrame) -> Table:
    """The numbers of ``scaling_table``, or of its CSV file, as a table."""
    names = [name for name in data if name in ROWS]
    columns = [Column("evidence", "evidence", is_key=True), Column("model", "model", is_key=True)]
    worker = display.worker_word(data) if "on_cpu" in data else "GPU"
    columns += [replace(c, head=c.head.replace("GPU", worker)) for c in _MADE_OF]
    columns += [Column(n, display.setting_label(n), is_key=True) for n in display.varied(data)]
    flops = display.flops_unit(data[names].to_numpy(dtype=float).ravel())
    form = display.count if flops.name == "TFLOP/s" else flops.form
    columns += [Column(name, display.contender_label(name), form=form) for name in names]
    searched = [f"{name}_{kept}" for name in names for kept in _KEPT]
    columns += [Column(name, name, hidden=True) for name in searched if name in data]
    if gaps := [name for name in searched if name.endswith("_gap") and name in data]:
        data = data.assign(gap=data[gaps].max(axis=1))
        columns.append(Column("gap", "largest gap", form=display.share))
    columns.append(Column("mfu", "share of peak", form=display.share))
    all_flops = display.flops_unit(1e3 * data["pflops"]) if data["pflops"].max() < 0.1 else None
    total = all_flops.name if all_flops else "PFLOP/s"
    form = (lambda value: all_flops.form(1e3 * value)) if all_flops else _tenths
    columns.append(Column("pflops", total, form=form))
    columns += [
        Column(name, head, form=display.count) for name, head in _PAPERS.items() if name in data
    ]
    caption = (
        f"Model {flops.name} per {worker}; share of peak and {total} of all {worker}s are the "
        "fastest one's; a gap is by how much a search may have missed its space's best."
    )
    return table("scaling", "Scaling", tuple(columns), data, caption=caption)
