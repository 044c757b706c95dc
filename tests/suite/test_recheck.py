"""Committed rows are what today's code computes: a few rows of each table, other rows every day.

A table does not show that older code has computed it. One altered row among n is found on a given
day with the chance rows / n; code that changes all rows is found at once.
"""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Callable
from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation
from functools import cache
from typing import Any

import pandas as pd
import pytest

from benchmarks.evidence import memory_table, schedules
from benchmarks.evidence.renew import REFERENCE
from benchmarks.records.simulated import shape_named
from benchmarks.specification.reading import preset
from benchmarks.validation.errors import errors_of
from benchmarks.validation.predict import Prediction, outcome_of
from benchmarks.validation.rows import read_rows, training_tables
from benchmarks.verdict.assumptions import REPRICED
from benchmarks.verdict.cells import Cell, priced_again
from benchmarks.verdict.uncertainty import judged
from zeropp.choose.task import Task
from zeropp.price.cluster import Cluster

Row = dict[str, str]
TODAY = datetime.now(UTC).date().toordinal()


def read(path: str) -> list[Row]:
    return list(csv.DictReader((REFERENCE / path).read_text().splitlines()))


@cache
def published() -> dict[str, Any]:
    return {line.place: line for path in training_tables() for line in read_rows(path)}


def validation(row: Row) -> dict[str, Any]:
    outcome = outcome_of(published()[row["place"]])
    computed = {name: outcome.line.cells[name] for name in row if name in outcome.line.cells}
    computed["reason"] = outcome.reason
    if outcome.prediction is not None:
        computed["predicted"] = outcome.prediction.text
        computed["relative_error"] = f"{outcome.prediction.relative_error:.4f}"
        computed["fits"] = "yes" if outcome.prediction.fits else "no"
    return computed


def plan(row: Row) -> dict[str, Any]:
    if row["plan"] == "no plan fits":
        return {"step_s": ""}
    task = Task(
        shape=shape_named(row["model"]),
        cluster=preset("cluster", row["cluster"], Cluster),
        num_gpus=int(row["num_gpus"]),
        global_batch=int(row["global_batch"]),
    )
    line = priced_again(Cell(task, float(row["bandwidth"])), row["mode"], row["setting"])
    # A row may have the plan of another row that is its own, too (``with_shared_plans``).
    computed = line | {name: row[name] for name in ("commit", "contender")}
    return {k: f"{v:.6g}" if isinstance(v, float) else v for k, v in computed.items()}


def memory(row: Row) -> dict[str, Any]:
    keys = row["contender"], row["model"], row["plan"]
    (case,) = (c for c in memory_table.CASES if (c.contender, c.model, c.text) == keys)
    return memory_table.price(case, dict(row)) | {"commit": row["commit"]}


def schedule(row: Row) -> dict[str, Any]:
    found = schedules.rows_of_size(int(row["ranks"]), int(row["microbatches"]))
    keys = "schedule", "chunks", "unit"
    (same_keys,) = (r for r in found if all(str(r.get(k, "")) == row[k] for k in keys))
    return same_keys


# Table: (how many rows are drawn, how one of them is computed again).
DRAWN: dict[str, tuple[int, Callable[[Row], dict[str, Any]]]] = {
    "validation/validation.csv": (20, validation),
    "claim_33/plans.csv": (4, plan),
    "atlas/plans.csv": (4, plan),
    "memory/traced_vs_simulated.csv": (3, memory),
    "schedules.csv": (2, schedule),
}


def differences(stored: Row, computed: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """The columns in which a stored row differs from what was computed, as (stored, computed)."""
    texts = {name: "" if value is None else str(value) for name, value in computed.items()}
    return {
        name: (stored[name], text) for name, text in texts.items() if not same(stored[name], text)
    }


def same(stored: str, computed: str) -> bool:
    """Whether two texts are equal, or are numbers that agree to the last digit of the coarser one,
    with a little more for binary fractions."""
    try:
        a, b = Decimal(stored), Decimal(computed)
    except InvalidOperation:
        return stored == computed
    places = [int(number.as_tuple().exponent) for number in (a, b)]
    digit = Decimal(1).scaleb(max(places)) if any(places) else Decimal(0)
    return abs(a - b) <= digit * Decimal("1.01")


@pytest.mark.parametrize("path", DRAWN)
def test_a_sample_of_a_committed_table_is_what_the_code_computes(path: str) -> None:
    count, again = DRAWN[path]
    for row in random.Random(TODAY).sample(read(path), count):
        computed = again(row)
        assert differences(row, computed) == {}, row
        name = next(n for n in computed if row[n].replace(".", "").isdigit())
        altered = row | {name: f"{1.01 * float(row[name]) + 1:.6g}"}
        assert list(differences(altered, computed)) == [name]


def test_orders_are_within_the_committed_bound() -> None:
    bound = json.loads((REFERENCE / "schedule_orders.json").read_text())["bound"]
    sizes = list(schedules.sizes(bound["largest_ranks"]))
    assert (len(sizes), bound["missed"]) == (bound["sizes"], 0)
    assert bound["largest_over_bound"] <= 1 + 1e-9
    drawn = random.Random(TODAY).sample(sizes, 20)
    assert max(map(schedules.over_bound, drawn)) <= bound["largest_over_bound"] + 1e-9


def test_every_published_row_and_every_plan_is_there() -> None:
    assert {row["place"] for row in read("validation/validation.csv")} == set(published())
    present = {
        (r["contender"], r["model"], r["plan"]) for r in read("memory/traced_vs_simulated.csv")
    }
    assert present == {(c.contender, c.model, c.text) for c in memory_table.CASES}


def test_errors_follow_from_the_committed_predictions() -> None:
    rows = [r for r in read("validation/validation.csv") if r["predicted"] and r["fits"]]
    found = errors_of([predicted(row) for row in rows if row["unit"] != "yes/no"])
    stored = pd.read_csv(REFERENCE / "validation/errors.csv")
    pd.testing.assert_frame_equal(found, stored, rtol=0, atol=1.1e-4)


def predicted(cells: Row) -> Prediction:
    return Prediction(published()[cells["place"]].row, float(cells["predicted"]))


def test_the_verdict_follows_from_the_committed_plans() -> None:
    folder = REFERENCE / "claim_33"
    verdicts, _ = judged(pd.read_csv(folder / "plans.csv"), pd.read_csv(folder / REPRICED))
    text = verdicts.to_csv(index=False, float_format="%.4g")
    assert text == (folder / "verdict.csv").read_text(encoding="utf-8")


def test_simulated_memory_is_that_of_the_traced_ranks() -> None:
    """DeepSpeed and Megatron-Core are traced with models of some MiB; a few tensors are a
    few percent."""
    limits = {"zeropp": 0.03, "torch_pp": 0.03, "fsdp": 0.03, "deepspeed_3d": 0.10}
    limits["megatron_core_local"] = 0.05
    rows = read("memory/traced_vs_simulated.csv")
    assert {row["contender"] for row in rows} == set(limits)
    off = [row for row in rows if abs(float(row["relative_error"])) > limits[row["contender"]]]
    assert off == []


@pytest.mark.parametrize(
    ("stored", "computed", "equal"),
    [
        ("1.3750", "1.37504", True),
        ("1.3750", "1.3752", False),
        ("2", "3", False),
        ("OOM", "fits", False),
        ("", "0.0", False),
        ("1338.88", "1338.8811", True),
    ],
)
def test_rounding_is_no_difference(stored: str, computed: str, equal: bool) -> None:
    assert same(stored, computed) is equal
