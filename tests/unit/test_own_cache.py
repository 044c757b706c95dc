"""Tables that are their own cache: what a table has is not computed again."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pandas as pd

from benchmarks.records.own_cache import Job, Line, fill


def found(number: int, before: list[Line]) -> list[Line]:
    return [{"number": number, "before": sum(line["number"] for line in before)}]


def test_a_table_is_filled_in_chains_and_what_it_has_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    pd.DataFrame([{"number": 2, "before": 77}]).to_csv(path, index=False)
    jobs: list[tuple[int, Job]] = [(number, partial(found, number)) for number in (1, 2, 4)]
    lines = fill(path, [jobs], lambda line: line["number"], "numbers")
    assert lines == [
        {"number": 2, "before": 77},
        {"number": 1, "before": 0},
        {"number": 4, "before": 1},
    ]
    assert pd.read_csv(path).to_dict("records") == lines
