"""The committed tables of results/reference: their files, keys and commands."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.studies.recheck.again import (
    SINCE_KEYS,
    VERDICT_KEYS,
    Computed,
    Key,
    Row,
    error_keys,
    error_row,
    memory_keys,
    memory_row,
    order_row,
    order_rows,
    plan_row,
    schedule_row,
    since_keys,
    since_row,
    validation_keys,
    validation_row,
    verdict_keys,
    verdict_row,
)


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
