"""Scaling in the form of Tables 1 and 2 of arXiv 2104.04473: a line per model and number of GPUs,
with what it is made of, every contender's FLOP/s, and what the paper measured there.

FLOP/s are the model's own, without recomputation (docs/metrics.md). The paper counts a second
forward of the blocks (its equation 3): its numbers are multiplied by what is left without that.
"""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

from benchmarks import CHECKOUT
from benchmarks.report import DEFAULTS, Options, display
from benchmarks.report.frame import CELL, best_or_failed
from benchmarks.report.table import Column, Table, table
from benchmarks.specification.contenders import ROWS

_PUBLISHED = CHECKOUT / "results" / "published"
_TABLES = ("megatron_sc21_table1.csv", "megatron_sc21_table2.csv")
_SAME = ["layers", "hidden", "num_gpus", "global_batch"]
_PAPERS = {"megatron_lm_2021": "Megatron-LM, published", "zero3_2021": "ZeRO-3, published"}
_MADE_OF = {
    "cluster": "cluster", "parameters_b": "parameters [B]", "heads": "heads", "hidden": "hidden",
    "layers": "layers", "num_gpus": "GPUs", "global_batch": "batch",
}  # fmt: skip

_SIZES = {f"model.{name}" for name in _MADE_OF}


def scaling_table(rows: pd.DataFrame, options: Options = DEFAULTS) -> Table:
    """One line per cell: the model's sizes, TFLOP/s per GPU of every contender at its fastest
    configuration, the fastest one's share of the peak and PFLOP/s of all GPUs, and the published
    TFLOP/s per GPU of the same model, GPUs and batch on A100."""
    lines: list[dict[str, Any]] = []
    for _, cell in best_or_failed(rows).groupby(CELL, sort=False, dropna=False):
        first, fastest = cell.iloc[0], cell.iloc[cell["model_tflops_per_gpu"].fillna(0.0).argmax()]
        sizes = first["source"]["spec"]["model"]
        line = {name: first[name] for name in ("evidence", "model", "cluster", *_SAME[2:])}
        line |= {name: sizes.get(name, math.nan) for name in ("heads", "hidden", "layers")}
        line |= {name: first[name] for name in display.varied(rows) if name not in _SIZES}
        line |= dict(zip(cell["contender"], cell["model_tflops_per_gpu"], strict=True))
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
    columns += [
        Column(name, head, is_key=name == "cluster", form=_form(name))
        for name, head in _MADE_OF.items()
    ]
    columns += [Column(n, display.setting_label(n), is_key=True) for n in display.varied(data)]
    flops = display.flops_unit(data[names].to_numpy(dtype=float).ravel())
    form = display.count if flops.name == "TFLOP/s" else flops.form
    columns += [Column(name, display.contender_label(name), form=form) for name in names]
    columns.append(Column("mfu", "share of peak", form=display.share))
    columns.append(Column("pflops", "PFLOP/s", form=_tenths))
    columns += [
        Column(name, head, form=display.count) for name, head in _PAPERS.items() if name in data
    ]
    caption = (
        f"Model {flops.name} per GPU; share of peak and PFLOP/s of all GPUs are the fastest one's."
    )
    return table("scaling", "Scaling", tuple(columns), data, caption=caption)


def _form(name: str) -> display.Form | None:
    if name == "cluster":
        return None
    return _tenths if name == "parameters_b" else "{:,.0f}".format


def _tenths(value: float) -> str:
    return f"{value:,.1f}" if value >= 0.1 else f"{value:.2g}"
