"""The comparison as a table narrow enough for a terminal and a README, and as sentences."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import pandas as pd
from rich.console import Console

from benchmarks.records.stats import paired_ratio
from benchmarks.report import forms, words
from benchmarks.report.frame import CELL, best_configuration
from benchmarks.report.pairs import BASE, SUBJECT, paired_speedups, speedup_of
from benchmarks.report.table import Cell, Column, Grid, Table, table

_CONTENDER, _LAYOUT = "contender", "configuration"


def headline_table(rows: pd.DataFrame, base: str = BASE) -> Table:
    """One row per cell and configuration: throughput, MFU, peak, speed-up over the base's fastest.

    ``rows`` are those of ``latest_ok``. Ranges are 95 % bootstrap intervals of medians; ``~``
    marks a speed-up that its samples do not settle (``pairs.doubts``).
    """
    bases = {
        tuple(row[key] for key in CELL): row
        for row in best_configuration(rows[rows["contender"] == base]).to_dict("records")
    }
    lines = [_line(row, bases) for row in rows.to_dict("records")]
    worker = words.worker_word(rows)
    columns = (
        Column("model", "model", is_key=True),
        Column("num_gpus", f"{worker}s", form=words.count, is_key=True),
        Column("cluster", "cluster", is_key=True),
        Column("global_batch", "batch", form=words.count, is_key=True),
        Column("precision", "precision", is_key=True),
        Column("evidence", "evidence", is_key=True),
        Column("basis", "basis", is_key=True),
        Column("contender", _CONTENDER),
        Column("layout", _LAYOUT),
        Column(
            "tokens_per_s_per_gpu", f"tokens/s/{worker}", form=words.tokens, instead="shown_status"
        ),
        Column("mfu", "MFU", form=words.share),
        Column("peak_gib", "GiB", form=words.gib),
        Column("speedup", "speed-up", form=words.ratio, interval=True, unsure="unsure"),
    )
    data = pd.DataFrame(lines, columns=None if lines else [*rows.columns])
    over = f"Speed-up over {words.contender_label(base)}. " if bases else ""
    caption = f"{over}GiB is the peak of the fullest {worker}."
    untuned = dict.fromkeys(rows[rows["default_degrees"].eq(True)]["contender"])
    if untuned:
        caption += f" Default degrees: {', '.join(map(words.contender_label, untuned))}."
    data = data.set_axis(data["record_id"].astype(str).to_list())
    return table("headline", "Comparison", columns, data, caption=caption)


def _line(row: dict[Any, Any], bases: dict[tuple[Any, ...], dict[Any, Any]]) -> dict[Any, Any]:
    base = bases.get(tuple(row[key] for key in CELL))
    pair: dict[str, Any] = {"speedup": math.nan}
    if base is not None and row["status"] == "ok":
        pair = speedup_of(row, base)
    fine = row["status"] == "ok"
    return row | pair | {"shown_status": "–" if fine else words.status_label(row["status"])}


def print_table(made: Table, console: Console) -> None:
    """Print a table with all of its text: if the terminal is too narrow, configurations and
    intervals move to a second line."""
    grid = made.grid()
    console.print(forms.rich_table(grid if forms.fits(grid, console) else narrowed(grid)))


def narrowed(grid: Grid) -> Grid:
    """The grid with the configuration below its contender and every interval below its number."""
    heads, rows = list(grid.heads), [list(row) for row in grid.rows]
    numeric = list(grid.numeric)
    if _LAYOUT in heads and _CONTENDER in heads:
        layout, contender = heads.index(_LAYOUT), heads.index(_CONTENDER)
        for row in rows:
            named, below = row[contender], row.pop(layout).text
            row[contender] = dataclasses.replace(named, text=f"{named.text}\n {below}")
        heads.pop(layout)
        numeric.pop(layout)
    lines = [tuple(_two_lines(cell) for cell in row) for row in rows]
    return dataclasses.replace(
        grid, heads=tuple(heads), numeric=tuple(numeric), rows=tuple(lines), groups=()
    )


def _two_lines(cell: Cell) -> Cell:
    return dataclasses.replace(cell, text=cell.text.replace(" [", "\n["))


def answers(rows: pd.DataFrame, base: str = BASE, contender: str = SUBJECT) -> Iterator[str]:
    """What these records show for a contender against the base: one sentence per kind of evidence,
    basis of comparison and cluster."""
    pairs = paired_speedups(rows, base)
    pairs = pairs[pairs["contender"] == contender]
    who, over = words.contender_label(contender), words.contender_label(base)
    if pairs.empty:
        yield f"No cell of these records has both {who} and {over}, so there is no speed-up."
    for (evidence, basis, cluster), mine in pairs.groupby(["evidence", "basis", "cluster"]):
        said = ", ".join(filter(None, (str(evidence).capitalize(), str(basis))))
        where = words.cluster_label(str(cluster))
        untuned = ", default degrees" if mine["default_degrees"].eq(True).any() else ""
        yield f"{said} on {where}{untuned}: {who} {_factor(mine)} {over}{_memory(mine)}."


def _factor(pairs: pd.DataFrame) -> str:
    """Words such as ``trains 1.87 to 3.13 times as fast (geometric mean 2.26 over 4 cells) as``."""
    low, high = pairs["speedup"].min(), pairs["speedup"].max()
    unsure = int(pairs["unsure"].eq(True).sum())
    doubt = f", {unsure} of them unsettled" if unsure else ""
    if len(pairs) == 1:
        return f"trains {words.ratio(low)} times as fast{' (unsettled)' if unsure else ''} as"
    mean = paired_ratio(list(pairs["speedup"]))
    return (
        f"trains {words.ratio(low)} to {words.ratio(high)} times as fast (geometric mean "
        f"{words.ratio(mean.median)} over {len(pairs)} cells{doubt}) as"
    )


def _memory(pairs: pd.DataFrame) -> str:
    ratios = pairs["memory_ratio"].dropna()
    if ratios.empty:
        return ""
    low, high = words.ratio(ratios.min()), words.ratio(ratios.max())
    return f", at {low if low == high else f'{low} to {high}'} times its peak memory"
