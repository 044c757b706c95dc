"""How one row of each committed table is computed again, and which rows a table must have.

A row is a mapping from column to the text in the file. The columns that identify it are read, and
the functions of the study that wrote it compute the others.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks.specification.compose import preset
from benchmarks.studies import memory_table, schedule_orders, schedule_table
from benchmarks.studies.claim_33.cells import Cell, priced_again
from benchmarks.studies.claim_33.judge import judge
from benchmarks.studies.validation.errors import outcome_of
from benchmarks.studies.validation.reader import read_rows, training_tables
from benchmarks.studies.validation.since import errors_since
from benchmarks.studies.validation.stored import stored_errors
from zeropp.cluster import Cluster
from zeropp.plan import Task
from zeropp.shape import ModelShape

Row = dict[str, str]
Computed = dict[str, Any]
Key = tuple[str, ...]


class StaleError(ValueError):
    """Today's code would not write this row at all; the message says why."""


def schedule_row(row: Row, reference: Path) -> Computed:
    del reference
    ranks, m, chunks = int(row["ranks"]), int(row["microbatches"]), int(row["chunks"])
    if row["cap"]:
        named = schedule_table.lean_rows(ranks, m)
        keys = ("schedule", "chunks", "cap")
        return _one_of(named, keys, row)
    if row["schedule"] != "ZeroPP":
        order = schedule_table.torch_schedule(row["schedule"], ranks, chunks, m)
    else:
        unit, keep = int(row["unit"]), int(row["keep"])
        order = schedule_table.zeropp_schedule(
            num_ranks=ranks, chunks=chunks, num_microbatches=m, unit=unit, keep=keep
        )
    return schedule_table.measure(order)


def memory_row(row: Row, reference: Path) -> Computed:
    del reference
    key = row["contender"], row["model"], row["plan"]
    cases = {(case.contender, case.model, case.text): case for case in memory_table.CASES}
    if key not in cases:
        raise StaleError("the study no longer has this plan")
    computed = memory_table.price(cases[key], dict(row))
    checked = {name: computed[name] for name in computed if name.startswith("simulated_")}
    kinds = [cell for name, cell in row.items() if re.fullmatch(r"traced_(?!total)\w+_gib", name)]
    total = f"{sum(map(float, kinds)):.3f}"  # the file rounds each kind to four digits
    return checked | {"relative_error": computed["relative_error"], "traced_total_gib": total}


def memory_keys(reference: Path) -> Iterable[Key]:
    del reference
    for case in memory_table.CASES:
        for rank in memory_table.ranks_of(case.plan().layout.pp):
            yield case.contender, case.model, case.text, str(rank)


def validation_row(row: Row, reference: Path) -> Computed:
    del reference
    lines = _published()
    if row["place"] not in lines:
        raise StaleError("results/published no longer has this row")
    outcome = outcome_of(lines[row["place"]])
    computed: Computed = {"reason": outcome.reason, "predicted": ""}
    if outcome.prediction is not None:
        computed["predicted"] = outcome.prediction.text
        computed["relative_error"] = f"{outcome.prediction.relative_error:.4f}"
        computed["fits"] = "yes" if outcome.prediction.fits else "no"
    return {**lines[row["place"]].cells, **computed}


def validation_keys(reference: Path) -> Iterable[Key]:
    del reference
    return ((place,) for place in _published())


@cache
def _published() -> dict[str, Any]:
    return {line.place: line for path in training_tables() for line in read_rows(path)}


def since_row(row: Row, reference: Path) -> Computed:
    return _one_of(_errors_since(reference / "validation"), SINCE_KEYS, row)


def since_keys(reference: Path) -> Iterable[Key]:
    return _keys(_errors_since(reference / "validation"), SINCE_KEYS)


def error_row(row: Row, reference: Path) -> Computed:
    return _one_of(_stored_errors(reference / "validation"), SINCE_KEYS, row)


def error_keys(reference: Path) -> Iterable[Key]:
    return _keys(_stored_errors(reference / "validation"), SINCE_KEYS)


def _one_of(rows: Iterable[Computed], names: Sequence[str], row: Row) -> Computed:
    """The one of the computed rows that has the same keys as a stored one."""
    for computed in rows:
        if all(str(computed[name]) == row[name] for name in names):
            return computed
    raise StaleError("the table from which this one follows has no such row")


def _keys(rows: Sequence[Computed], names: Sequence[str]) -> Iterable[Key]:
    return (tuple(str(row[name]) for name in names) for row in rows)


SINCE_KEYS = ("kind", "source", "role")
_errors_since = cache(errors_since)


@cache
def _stored_errors(folder: Path) -> list[Computed]:
    return [error.cells() for error in stored_errors(folder / "validation.csv")]


def plan_row(row: Row, reference: Path) -> Computed:
    del reference
    if not row.get("setting"):
        if row["plan"] == "no plan fits":
            return {"step_s": ""}
        raise StaleError("the row has no setting: it was written by an older study")
    shape, cluster = (
        preset("model", row["model"], ModelShape),
        preset("cluster", row["cluster"], Cluster),
    )
    task = Task(
        shape=shape,
        cluster=cluster,
        num_gpus=int(row["num_gpus"]),
        global_batch=int(row["global_batch"]),
    )
    computed = priced_again(Cell(task, float(row["bandwidth"])), row["setting"]).columns()
    computed["mode"] = row["mode"]
    # The file has six digits, so the computed values are rounded to six as well.
    return {k: f"{v:.6g}" if isinstance(v, float) else v for k, v in computed.items()}


VERDICT_KEYS = ("model", "cluster", "num_gpus", "global_batch", "bandwidth", "mode")


def verdict_row(row: Row, reference: Path) -> Computed:
    return _one_of(_judged(reference / "claim_33" / "plans.csv"), VERDICT_KEYS, row)


def verdict_keys(reference: Path) -> Iterable[Key]:
    return _keys(_judged(reference / "claim_33" / "plans.csv"), VERDICT_KEYS)


@cache
def _judged(plans: Path) -> list[Computed]:
    """The rows of the verdict on a file of plans, as the study would write them."""
    text = judge(pd.read_csv(plans)).to_csv(index=False, float_format="%.4g")
    return [dict(row) for row in csv.DictReader(text.splitlines())]


def order_rows(document: dict[str, Any]) -> list[Row]:
    """The sizes that the document covers, as rows. Each row claims that its step over the bound is
    at most the largest one that the document gives."""
    bound = document["bound"]
    return [
        {"ranks": str(p), "chunks": str(v), "unit": str(u), "microbatches": str(m)}
        | {"within_bound": "yes", "largest": str(bound["largest_over_bound"])}
        | {"sizes": str(bound["sizes"]), "missed": str(bound["missed"])}
        | {"largest_ranks": str(bound["largest_ranks"])}
        for p, v, u, m in schedule_orders.sizes(bound["largest_ranks"])
    ]


def order_row(row: Row, reference: Path) -> Computed:
    del reference
    size = tuple(int(row[key]) for key in ("ranks", "chunks", "unit", "microbatches"))
    ratio, largest = schedule_orders.over_bound(size), float(row["largest"])  # type: ignore[arg-type]
    return {
        "within_bound": "yes" if ratio <= largest + 1e-9 else f"no, {ratio}",
        "sizes": sum(1 for _ in schedule_orders.sizes(int(row["largest_ranks"]))),
        "missed": "0" if largest <= 1 + 1e-9 else "more than 0",
    }
