"""Writes all committed tables anew, one study after the other.

A renewal takes more than an hour. ``.renewed.json`` beside the tables says which are finished, and
with which version of the suite's files, so that the same command goes on where it was stopped;
tables that were begun keep the rows that they have.
"""

from __future__ import annotations

import csv
import json
import math
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks import CHECKOUT
from benchmarks.records.environment import read_code
from benchmarks.records.record import write_atomically
from benchmarks.specification.compose import preset
from benchmarks.studies import memory_table, schedule_orders, schedule_table
from benchmarks.studies.claim_33.cells import Cell, priced_again
from benchmarks.studies.claim_33.judge import judge
from benchmarks.studies.validation.errors import outcome_of
from benchmarks.studies.validation.rows import read_rows, training_tables
from benchmarks.studies.validation.since import errors_since
from benchmarks.studies.validation.stored import stored_errors
from zeropp.cluster import Cluster
from zeropp.plan import Task
from zeropp.shape import ModelShape

# How one row of each committed table is computed again, and which rows a table must have.
#
# A row is a mapping from column to the text in the file. The columns that identify it are read, and
# the functions of the study that wrote it compute the others.


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


# Whether two texts of a cell are equal except for rounding, and what changed in a table.


_SLACK = 1.01  # units in the last digit: a half per side, and a little for binary fractions


def differences(stored: Row, computed: Computed) -> dict[str, tuple[str, str]]:
    """The columns in which a stored row differs from what was computed, as (stored, computed)."""
    return {
        name: (stored.get(name, ""), _text(value))
        for name, value in computed.items()
        if not same(stored.get(name, ""), _text(value))
    }


def same(stored: str, computed: str) -> bool:
    """Whether two texts are equal, or are numbers that agree to the last digit of the coarser
    one."""
    if stored == computed:
        return True
    a, b = _number(stored), _number(computed)
    if a is None or b is None:
        return False
    unit = max(_last_place(a), _last_place(b))
    return abs(a - b) <= unit * Decimal(_SLACK)


def moved(old: Sequence[Row], new: Sequence[Row], keys: Sequence[str]) -> Iterator[str]:
    """Lines that say how many rows were added or removed and, for every column, how many rows
    changed and by how much at most, relative to the old number."""
    before, after = ({tuple(r.get(k, "") for k in keys): r for r in rows} for rows in (old, new))
    gone, come = len(before.keys() - after.keys()), len(after.keys() - before.keys())
    if gone or come:
        yield f"{gone} rows removed, {come} added"
    columns: dict[str, list[float]] = {}
    for key in before.keys() & after.keys():
        for name, (a, b) in differences(before[key], after[key]).items():
            columns.setdefault(name, []).append(_relative(a, b))
    for name, moves in columns.items():
        known = [move for move in moves if math.isfinite(move)]
        by = f", by {max(known):.2%} at most" if known else ""
        yield f"{name}: {len(moves)} of {len(after)} rows differ{by}"


def _text(value: object) -> str:
    return "" if value is None else str(value)


def _number(text: str) -> Decimal | None:
    try:
        number = Decimal(text)
    except InvalidOperation:
        return None
    return number if number.is_finite() else None


def _last_place(number: Decimal) -> Decimal:
    """One unit in the last digit of a number; 0 for a whole number without a decimal point."""
    exponent = number.as_tuple().exponent
    assert isinstance(exponent, int)
    return Decimal(1).scaleb(exponent) if exponent else Decimal(0)


def _relative(old: str, new: str) -> float:
    a, b = _number(old), _number(new)
    if a is None or b is None or not a:
        return math.inf
    return float(abs(b / a - 1))


# The committed tables of results/reference: their files, keys and commands.


@dataclass(frozen=True, kw_only=True)
class Table:
    """One committed table.

    ``keys`` are the columns that identify a row. ``rows`` is how many rows a check draws by
    default. ``again`` computes some columns of a row. ``command`` is the module and the arguments
    that write the whole table; it is empty where the command of another table writes this one, too.
    ``anew`` are further arguments with which the command also computes rows that the file has.
    ``all_keys`` gives the keys of all rows that the file must have, where they are known without
    much computing.
    """

    path: str  # below results/reference
    keys: tuple[str, ...]
    rows: int
    again: Callable[[Row, Path], Computed]
    command: tuple[str, ...]
    anew: tuple[str, ...] = ()
    all_keys: Callable[[Path], Iterable[Key]] | None = None

    def missing(self, reference: Path) -> list[str]:
        """The keys of rows that the file must have and has not."""
        if self.all_keys is None:
            return []
        present = {tuple(row[key] for key in self.keys) for row in self.read(reference)}
        return [" ".join(key) for key in self.all_keys(reference) if key not in present]

    def read(self, reference: Path) -> list[Row]:
        """All rows of the file."""
        text = (reference / self.path).read_text()
        if self.path.endswith(".json"):
            return order_rows(json.loads(text))
        return list(csv.DictReader(text.splitlines()))


_STUDY = "benchmarks.studies"
_FOR_CLAIM_33 = ("benchmarks.run", "experiment=claim_33")

TABLES: Sequence[Table] = (
    Table(
        path="schedules.csv",
        keys=("ranks", "microbatches", "schedule", "chunks", "unit", "keep"),
        rows=8,
        again=schedule_row,
        command=(f"{_STUDY}.schedule_table", "{reference}/schedules.csv"),
    ),
    Table(
        path="schedule_orders.json",
        keys=("ranks", "chunks", "unit", "microbatches"),
        rows=20,
        again=order_row,
        command=(f"{_STUDY}.schedule_orders", "--out", "{reference}/schedule_orders.json"),
    ),
    Table(
        path="memory/traced_vs_simulated.csv",
        keys=("contender", "model", "plan", "pipeline_rank"),
        rows=3,
        again=memory_row,
        all_keys=memory_keys,
        command=(f"{_STUDY}.memory_table", "{reference}/memory/traced_vs_simulated.csv"),
    ),
    Table(
        path="validation/validation.csv",
        keys=("place",),
        rows=20,
        again=validation_row,
        all_keys=validation_keys,
        command=("benchmarks.validate", "--out", "{reference}/validation"),
    ),
    Table(
        path="validation/errors.csv",
        keys=SINCE_KEYS,
        rows=1000,
        again=error_row,
        all_keys=error_keys,
        command=(),
    ),
    Table(
        path="validation/since.csv",
        keys=SINCE_KEYS,
        rows=1000,  # all: they follow from other tables, and nothing is priced
        again=since_row,
        all_keys=since_keys,
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
        again=plan_row,
        command=(*_FOR_CLAIM_33, "report_dir={reference}/claim_33"),
        anew=("rerun=all",),
    ),
    Table(
        path="claim_33/verdict.csv",
        keys=VERDICT_KEYS,
        rows=1000,
        again=verdict_row,
        all_keys=verdict_keys,
        command=(),
    ),
)


_STATE = ".renewed.json"


def renew(tables: Sequence[Table], reference: Path, home: Path) -> int:
    """Run the studies of the tables that this version of the suite has not renewed yet, and print
    what changed in each. Returns 1 as soon as one fails, else 0. ``home`` is the folder of the
    committed tables, whose pictures the documentation shows."""
    code = read_code(ask_git=False).digest
    written = [table for table in tables if table.command]
    for number, table in enumerate(written, 1):
        state = _read_state(reference, code)
        print(f"{number} of {len(written)}: {table.path}", flush=True)
        if state.get(table.path) == "done":
            print("  renewed before by this version of the suite", flush=True)
            continue
        begun = state.get(table.path) == "begun"
        _write_state(reference, code, state | {table.path: "begun"})
        if not _run(table, reference, begun=begun):
            return 1
        _write_state(reference, code, state | {table.path: "done"})
        if reference == home:
            _move_pictures(reference)
    return 0


def _run(table: Table, reference: Path, *, begun: bool) -> bool:
    """Run one study and print what changed; returns whether it succeeded."""
    old, started = table.read(reference), time.monotonic()
    words = [word.format(reference=reference) for word in table.command]
    words += [] if begun else table.anew
    print(f"  python -m {' '.join(words)}", flush=True)
    done = subprocess.run([sys.executable, "-m", *words], cwd=CHECKOUT, stdout=sys.stderr)
    took = f"after {time.monotonic() - started:.0f} s"
    if done.returncode:
        print(f"  ended with status {done.returncode} {took}; the same command goes on from here")
        return False
    lines = list(moved(old, table.read(reference), table.keys))
    print("\n".join(f"  {line}" for line in [*(lines or ["nothing moved"]), took]), flush=True)
    return True


def _move_pictures(reference: Path) -> None:
    """Move the verdict's pictures to where the pages show them; remove what no page shows."""
    folder = reference / "claim_33"
    for picture in folder.glob("*.png"):
        picture.replace(CHECKOUT / "docs" / "images" / f"claim_33_{picture.name}")
    for drawing in folder.glob("*.svg"):
        drawing.unlink()
    shutil.rmtree(folder / "paper", ignore_errors=True)


def _read_state(reference: Path, code: str) -> dict[str, str]:
    """``begun`` or ``done`` by table; empty where another version of the suite wrote it."""
    try:
        state = json.loads((reference / _STATE).read_text())
    except (OSError, ValueError):
        return {}
    return dict(state["tables"]) if state.get("code") == code else {}


def _write_state(reference: Path, code: str, tables: dict[str, str]) -> None:
    write_atomically(reference / _STATE, json.dumps({"code": code, "tables": tables}, indent=1))
