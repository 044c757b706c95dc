"""The committed tables of results/reference, and how one row of each is computed again.

A row is a mapping from column to the text in the file. To compute it again, the columns that
identify it are read, and the functions of the study that wrote it compute the others.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
from zeropp.cluster import Cluster
from zeropp.plan import Task
from zeropp.shape import ModelShape

Row = dict[str, str]
Computed = dict[str, Any]


class StaleError(ValueError):
    """Today's code would not write this row at all; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """One committed table.

    ``keys`` are the columns that identify a row. ``rows`` is how many rows a check draws by
    default. ``again`` computes some columns of a row. ``command`` is the module and the arguments
    that write the whole table; it is empty where the command of another table writes this one, too.
    ``anew`` are further arguments with which the command also computes rows that the file has.
    """

    path: str  # below results/reference
    keys: tuple[str, ...]
    rows: int
    again: Callable[[Row, Path], Computed]
    command: tuple[str, ...]
    anew: tuple[str, ...] = ()

    def read(self, reference: Path) -> list[Row]:
        """All rows of the file."""
        text = (reference / self.path).read_text()
        if self.path.endswith(".json"):
            return _orders_rows(json.loads(text))
        return list(csv.DictReader(text.splitlines()))


def _schedule(row: Row, reference: Path) -> Computed:
    del reference
    ranks, m, chunks = int(row["ranks"]), int(row["microbatches"]), int(row["chunks"])
    if row["cap"]:
        named = schedule_table.lean_rows(ranks, m)
        keys = ("schedule", "chunks", "cap")
        return next(lean for lean in named if all(str(lean[key]) == row[key] for key in keys))
    if row["schedule"] != "ZeroPP":
        order = schedule_table.torch_schedule(row["schedule"], ranks, chunks, m)
    else:
        unit, keep = int(row["unit"]), int(row["keep"])
        order = schedule_table.zeropp_schedule(
            num_ranks=ranks, chunks=chunks, num_microbatches=m, unit=unit, keep=keep
        )
    return schedule_table.measure(order)


def _memory(row: Row, reference: Path) -> Computed:
    del reference
    key = row["contender"], row["model"], row["plan"]
    cases = {(case.contender, case.model, case.text): case for case in memory_table.CASES}
    if key not in cases:
        raise StaleError("the study no longer has this plan")
    computed = memory_table.price(cases[key], dict(row))
    return {name: value for name, value in computed.items() if name.startswith("simulated_")}


def _validation(row: Row, reference: Path) -> Computed:
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


@cache
def _published() -> dict[str, Any]:
    return {line.place: line for path in training_tables() for line in read_rows(path)}


def _since(row: Row, reference: Path) -> Computed:
    del reference
    key = [row[name] for name in SINCE_KEYS]
    for computed in _errors_since():
        if [computed[name] for name in SINCE_KEYS] == key:
            return dict(computed)
    raise StaleError("validation.csv and earlier.csv have no such source")


SINCE_KEYS = ("kind", "source", "role")
_errors_since = cache(errors_since)


def _plan(row: Row, reference: Path) -> Computed:
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


def _verdict(row: Row, reference: Path) -> Computed:
    keys = [row[key] for key in VERDICT_KEYS]
    for judged in _judged(reference / "claim_33" / "plans.csv"):
        if [str(judged[key]) for key in VERDICT_KEYS] == keys:
            return {name: value for name, value in judged.items() if name not in VERDICT_KEYS}
    raise StaleError("plans.csv has no such cell")


@cache
def _judged(plans: Path) -> list[Row]:
    """The rows of the verdict on a file of plans, as the study would write them."""
    text = judge(pd.read_csv(plans)).to_csv(index=False, float_format="%.4g")
    return list(csv.DictReader(text.splitlines()))


def _orders_rows(document: dict[str, Any]) -> list[Row]:
    """The sizes that the document covers, as rows. Each row claims that its step over the bound is
    at most the largest one that the document gives."""
    bound = document["bound"]
    return [
        {"ranks": str(p), "chunks": str(v), "unit": str(u), "microbatches": str(m)}
        | {"within_bound": "yes", "largest": str(bound["largest_over_bound"])}
        for p, v, u, m in schedule_orders.sizes(bound["largest_ranks"])
    ]


def _orders(row: Row, reference: Path) -> Computed:
    del reference
    size = tuple(int(row[key]) for key in ("ranks", "chunks", "unit", "microbatches"))
    ratio = schedule_orders.over_bound(size)  # type: ignore[arg-type]
    return {"within_bound": "yes" if ratio <= float(row["largest"]) + 1e-9 else f"no, {ratio}"}


_STUDY = "benchmarks.studies"
_FOR_CLAIM_33 = ("benchmarks.run", "experiment=claim_33")

TABLES: Sequence[Table] = (
    Table(
        path="schedules.csv",
        keys=("ranks", "microbatches", "schedule", "chunks", "unit", "keep"),
        rows=8,
        again=_schedule,
        command=(f"{_STUDY}.schedule_table", "{reference}/schedules.csv"),
    ),
    Table(
        path="schedule_orders.json",
        keys=("ranks", "chunks", "unit", "microbatches"),
        rows=20,
        again=_orders,
        command=(f"{_STUDY}.schedule_orders", "--out", "{reference}/schedule_orders.json"),
    ),
    Table(
        path="memory/traced_vs_simulated.csv",
        keys=("contender", "model", "plan", "pipeline_rank"),
        rows=3,
        again=_memory,
        command=(f"{_STUDY}.memory_table", "{reference}/memory/traced_vs_simulated.csv"),
    ),
    Table(
        path="validation/validation.csv",
        keys=("place",),
        rows=20,
        again=_validation,
        command=("benchmarks.validate", "--out", "{reference}/validation"),
    ),
    Table(
        path="validation/since.csv",
        keys=SINCE_KEYS,
        rows=10,
        again=_since,
        command=(
            f"{_STUDY}.validation.since",
            "--from",
            "{reference}/validation",
            "--out",
            "{reference}/validation/since.csv",
        ),
    ),
    Table(
        path="claim_33/plans.csv",
        keys=(*VERDICT_KEYS, "contender"),
        rows=4,
        again=_plan,
        command=(*_FOR_CLAIM_33, "report_dir={reference}/claim_33"),
        anew=("rerun=all",),
    ),
    Table(path="claim_33/verdict.csv", keys=VERDICT_KEYS, rows=10, again=_verdict, command=()),
)
