"""Records as a DataFrame: one row per record, one column per quantity, units in column names."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path

import pandas as pd

from benchmarks.records.record import RecordError, find_records, read_record
from benchmarks.report.plans_file import find_plans, read_plans
from benchmarks.report.row import Row, row_of
from benchmarks.specification.contenders import PRICED

# The columns of a cell: rows that agree in these differ in the contender only, so they compare.
CELL = [
    *("model", "cluster", "num_gpus", "global_batch", "seq", "precision"),
    *("evidence", "basis"),
]
_COLUMNS = [column.name for column in fields(Row)]


def load_frame(roots: Iterable[Path]) -> tuple[pd.DataFrame, list[str]]:
    """(all records below the roots, the oldest first; one line per file that was skipped).

    The lines of a ``plans.csv`` of ``experiment=claim_33`` are rows, too.
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
    """The rows sorted by model size, then by the other columns of a cell, then by contender."""
    keys = ["evidence", "basis", "parameters", *CELL[:-2], "contender"]
    return rows.sort_values(keys, kind="stable", ignore_index=True)


def latest_ok(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows for tables: per cell, contender and configuration the latest success, or the latest
    attempt if none succeeded."""
    ranked = frame.assign(_ok=frame["status"] == "ok")
    ranked = ranked.sort_values(["_ok", "started_at"], kind="stable")
    kept = ranked.drop_duplicates([*CELL, "contender", "layout"], keep="last")
    return in_order(kept.drop(columns="_ok"))


def best_configuration(rows: pd.DataFrame) -> pd.DataFrame:
    """The fastest configuration per cell and contender, which figures compare."""
    fine = rows[(rows["status"] == "ok") & rows["tokens_per_s_per_gpu"].notna()]
    return _one_per_contender(fine.sort_values("tokens_per_s_per_gpu", kind="stable"))


def best_or_failed(rows: pd.DataFrame) -> pd.DataFrame:
    """Per cell and contender the fastest configuration, or the latest failure if none succeeded;
    the paper's table shows these. A success without a time (traced) counts as slowest."""
    ranked = rows.assign(_ok=rows["status"] == "ok")
    ranked = ranked.sort_values(
        ["_ok", "tokens_per_s_per_gpu", "started_at"], kind="stable", na_position="first"
    )
    return _one_per_contender(ranked.sort_values("_ok", kind="stable")).drop(columns="_ok")


def _one_per_contender(ranked: pd.DataFrame) -> pd.DataFrame:
    return in_order(ranked.drop_duplicates([*CELL, "contender"], keep="last"))


def notes_of(rows: pd.DataFrame) -> list[str]:
    """Notes for a reader of these rows' numbers, one line each."""
    simulated = set(rows[rows["evidence"].str.startswith("simulated")]["contender"])
    caveats = [known.caveat for name, known in PRICED.items() if name in simulated]
    shared = rows["source"].map(lambda source: bool(source.get("slurm", {}).get("neighbours")))
    beside = (
        f"{shared.sum()} of {len(rows)} rows were measured beside other jobs on their nodes "
        "(slurm.neighbours in their records)"
    )
    return [*filter(None, caveats)] + [beside] * bool(shared.any())
