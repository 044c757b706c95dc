"""Records as a DataFrame: one row per record, one column per quantity, units in the names."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path

import pandas as pd

from benchmarks.records.metrics import UNMEASURED
from benchmarks.records.record import RecordError, find_records, read_record
from benchmarks.report.plans_file import find_plans, read_plans
from benchmarks.report.row import Row, row_of

# What makes two rows comparable: they differ in the contender alone.
CELL = [
    *("model", "cluster", "num_gpus", "global_batch", "seq", "precision"),
    *("evidence", "basis"),
]
_COLUMNS = [column.name for column in fields(Row)]


def load_frame(roots: Iterable[Path]) -> tuple[pd.DataFrame, list[str]]:
    """All records below the roots, oldest first, and a line for each file that was skipped.

    Rows of a ``plans.csv`` that ``experiment=claim_33`` wrote are rows like others.
    """
    rows: list[Row] = []
    skipped: list[str] = []
    roots = list(roots)
    for path in (p for p in find_records(roots) if p.suffix != ".csv"):
        try:
            rows.append(_row_at(path))
        except RecordError as error:
            skipped.append(str(error))
    for path in find_plans(roots):
        try:
            rows += read_plans(path)
        except RecordError as error:
            skipped.append(str(error))
    frame = pd.DataFrame([vars(row) for row in rows], columns=_COLUMNS)
    return frame.sort_values("started_at", kind="stable", ignore_index=True), skipped


def _row_at(path: Path) -> Row:
    record = read_record(path)
    try:
        return row_of(record, str(path))
    except RecordError as error:
        raise RecordError(f"{path}: {error}") from None


def in_order(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows by model size, then by what else makes a cell, then by contender."""
    keys = ["evidence", "basis", "parameters", *CELL[:-2], "contender"]
    return rows.sort_values(keys, kind="stable", ignore_index=True)


def latest_ok(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows for tables: of each cell, contender and layout the latest success, or, where there
    is none, the latest attempt with its status."""
    ranked = frame.assign(_ok=frame["status"] == "ok")
    ranked = ranked.sort_values(["_ok", "started_at"], kind="stable")
    kept = ranked.drop_duplicates([*CELL, "contender", "layout"], keep="last")
    return in_order(kept.drop(columns="_ok"))


def best_configuration(rows: pd.DataFrame) -> pd.DataFrame:
    """Of each cell and contender the fastest configuration: what figures compare."""
    fine = rows[(rows["status"] == "ok") & rows["tokens_per_s_per_gpu"].notna()]
    return _one_per_contender(fine.sort_values("tokens_per_s_per_gpu", kind="stable"))


def best_or_failed(rows: pd.DataFrame) -> pd.DataFrame:
    """Of each cell and contender the fastest configuration or, where none succeeded, the latest
    failure: what a paper's table shows. A success without a time (traced) comes after one with."""
    ranked = rows.assign(_ok=rows["status"] == "ok")
    ranked = ranked.sort_values(
        ["_ok", "tokens_per_s_per_gpu", "started_at"], kind="stable", na_position="first"
    )
    return _one_per_contender(ranked.sort_values("_ok", kind="stable")).drop(columns="_ok")


def _one_per_contender(ranked: pd.DataFrame) -> pd.DataFrame:
    return in_order(ranked.drop_duplicates([*CELL, "contender"], keep="last"))


def notes_of(rows: pd.DataFrame) -> list[str]:
    """What must be said beside the numbers of these rows."""
    simulated = rows["evidence"].str.startswith("simulated") & rows["contender"].eq("zeropp")
    shared = rows["source"].map(lambda source: bool(source.get("slurm", {}).get("neighbours")))
    beside = (
        f"{shared.sum()} of {len(rows)} rows were measured beside other jobs on their nodes "
        "(slurm.neighbours in their records)"
    )
    return [UNMEASURED] * bool(simulated.any()) + [beside] * bool(shared.any())
