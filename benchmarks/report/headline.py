"""The comparison as a table narrow enough for a terminal and a README, and as sentences."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import pandas as pd
from rich.console import Console

from benchmarks.records.metrics import Summary, paired_ratio, ratio_of_medians
from benchmarks.report import forms, style
from benchmarks.report.frame import CELL, best_configuration
from benchmarks.report.table import Cell, Column, Grid, Table, table

# The speed-up between two contenders in the same cell, and whether the samples settle it.


SUBJECT = "zeropp"  # the contender that the suite is about: its columns come first
BASE = "deepspeed_3d"  # speed-ups are over this contender unless another one is named


class BaseError(ValueError):
    """No row is of the contender that was named as the base; the message names the contenders that
    rows are of."""


def base_of(rows: pd.DataFrame, name: str) -> str:
    """``name``, the key of the contender over which speed-ups are given. Raises BaseError if no row
    is of that contender."""
    known = sorted(set(rows["contender"]))
    if name not in known:
        raise BaseError(
            f"--base={name}: no record of that contender (there are {', '.join(known)})"
        )
    return name


def doubts(ratio: Summary) -> list[str]:
    """The reasons why samples do not settle a measured ratio; empty if they do."""
    reasons = []
    if ratio.unstable:
        reasons.append(f"unstable: spread {ratio.spread:.0%}, n={ratio.count}")
    if ratio.low <= 1.0 <= ratio.high:
        reasons.append("interval includes 1: no difference shown")
    return reasons


def speedup_of(row: Mapping[Any, Any], base: Mapping[Any, Any]) -> dict[str, Any]:
    """The ``speedup`` of a row over its base, with ``speedup_low`` and ``speedup_high`` if both
    were measured; ``unsure`` says whether there are doubts, which ``doubts`` has as text. The base
    itself has none."""
    missing: dict[str, Any] = {"unsure": False, "doubts": ""}
    missing |= dict.fromkeys(("speedup", "speedup_low", "speedup_high"), math.nan)
    if not row["samples_step_s"] or not base["samples_step_s"]:
        return missing
    if row["record_id"] == base["record_id"]:
        return missing | {"speedup": 1.0}
    found = ratio_of_medians(base["samples_step_s"], row["samples_step_s"])
    if row["evidence"] != "measured":
        return missing | {"speedup": found.median}
    why = doubts(found)
    return {
        "speedup": found.median,
        "speedup_low": found.low,
        "speedup_high": found.high,
        "unsure": bool(why),
        "doubts": "; ".join(why),
    }


def paired_speedups(rows: pd.DataFrame, base: str = BASE) -> pd.DataFrame:
    """One row per cell and contender except for the base, each in its fastest configuration.

    A row has the fields of ``speedup_of``, ``memory_ratio`` (only where both peaks are of the same
    kind), and ``records``, of which the base's is the last.
    """
    best = best_configuration(rows)
    bases = best[best["contender"] == base]
    others = best[best["contender"] != base]
    both = others.merge(bases, on=CELL, suffixes=("", "_base"))
    kept = [*CELL, "on_cpu", "contender", "default_degrees", "parameters"]
    lines = [{key: row[key] for key in kept} | _pair(row) for row in both.to_dict("records")]
    names = ["speedup", "speedup_low", "speedup_high", "unsure", "doubts", "memory_ratio"]
    return pd.DataFrame(lines, columns=[*kept, *names, "records"])


def _pair(row: dict[Any, Any]) -> dict[str, Any]:
    """One merged row, in which the base's columns end in ``_base``."""
    base: dict[Any, Any] = {key: row[f"{key}_base"] for key in ("samples_step_s", "record_id")}
    same_kind = row["memory_kind"] and row["memory_kind"] == row["memory_kind_base"]
    return {
        **speedup_of(row, base),
        "memory_ratio": row["peak_gib"] / row["peak_gib_base"] if same_kind else math.nan,
        "records": f"{row['record_id']} {row['record_id_base']}",
    }


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
    worker = style.worker_word(rows)
    columns = (
        Column("model", "model", is_key=True),
        Column("num_gpus", f"{worker}s", form=style.count, is_key=True),
        Column("cluster", "cluster", is_key=True),
        Column("global_batch", "batch", form=style.count, is_key=True),
        Column("precision", "precision", is_key=True),
        Column("evidence", "evidence", is_key=True),
        Column("basis", "basis", is_key=True),
        Column("contender", _CONTENDER),
        Column("layout", _LAYOUT),
        Column(
            "tokens_per_s_per_gpu", f"tokens/s/{worker}", form=style.tokens, instead="shown_status"
        ),
        Column("mfu", "MFU", form=style.share),
        Column("peak_gib", "GiB", form=style.gib),
        Column("speedup", "speed-up", form=style.ratio, interval=True, unsure="unsure"),
    )
    data = pd.DataFrame(lines, columns=None if lines else [*rows.columns])
    over = f"Speed-up over {style.contender_label(base)}. " if bases else ""
    caption = f"{over}GiB is the peak of the fullest {worker}."
    untuned = dict.fromkeys(rows[rows["default_degrees"].eq(True)]["contender"])
    if untuned:
        caption += f" Default degrees: {', '.join(map(style.contender_label, untuned))}."
    data = data.set_axis(data["record_id"].astype(str).to_list())
    return table("headline", "Comparison", columns, data, caption=caption)


def _line(row: dict[Any, Any], bases: dict[tuple[Any, ...], dict[Any, Any]]) -> dict[Any, Any]:
    base = bases.get(tuple(row[key] for key in CELL))
    pair: dict[str, Any] = {"speedup": math.nan}
    if base is not None and row["status"] == "ok":
        pair = speedup_of(row, base)
    fine = row["status"] == "ok"
    return row | pair | {"shown_status": "–" if fine else style.status_label(row["status"])}


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
    who, over = style.contender_label(contender), style.contender_label(base)
    if pairs.empty:
        yield f"No cell of these records has both {who} and {over}, so there is no speed-up."
    for (evidence, basis, cluster), mine in pairs.groupby(["evidence", "basis", "cluster"]):
        said = ", ".join(filter(None, (str(evidence).capitalize(), str(basis))))
        where = style.cluster_label(str(cluster))
        untuned = ", default degrees" if mine["default_degrees"].eq(True).any() else ""
        yield f"{said} on {where}{untuned}: {who} {_factor(mine)} {over}{_memory(mine)}."


def _factor(pairs: pd.DataFrame) -> str:
    """Words such as ``trains 1.87 to 3.13 times as fast (geometric mean 2.26 over 4 cells) as``."""
    low, high = pairs["speedup"].min(), pairs["speedup"].max()
    unsure = int(pairs["unsure"].eq(True).sum())
    doubt = f", {unsure} of them unsettled" if unsure else ""
    if len(pairs) == 1:
        return f"trains {style.ratio(low)} times as fast{' (unsettled)' if unsure else ''} as"
    mean = paired_ratio(list(pairs["speedup"]))
    return (
        f"trains {style.ratio(low)} to {style.ratio(high)} times as fast (geometric mean "
        f"{style.ratio(mean.median)} over {len(pairs)} cells{doubt}) as"
    )


def _memory(pairs: pd.DataFrame) -> str:
    ratios = pairs["memory_ratio"].dropna()
    if ratios.empty:
        return ""
    low, high = style.ratio(ratios.min()), style.ratio(ratios.max())
    return f", at {low if low == high else f'{low} to {high}'} times its peak memory"
