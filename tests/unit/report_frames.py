"""Frames of made-up records, and what tables show of them."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from rich.console import Console

from benchmarks.report.frame import load_frame
from benchmarks.report.table import Table
from tests.unit.synthetic_records import write_records

QUIET = Console(quiet=True)


def frame_of(*records: object, root: Path) -> pd.DataFrame:
    write_records(list(records), root)  # type: ignore[arg-type]
    frame, skipped = load_frame([root])
    assert skipped == []
    return frame


def column(table: Table, head: str) -> list[str]:
    """A column of a table as people read it, top to bottom."""
    grid = table.grid()
    index = grid.heads.index(head)
    return [row[index].text for row in grid.rows]


def failed(status: str, reason: str) -> dict[str, object]:
    return {"status": status, "reason": reason, "step_s": [], "spans": []}
