"""The committed table results/reference/schedules.csv: what it shows, and that it is ours today."""

from __future__ import annotations

import csv
from itertools import groupby
from pathlib import Path

import pytest

from zeropp.schedule import lower
from zeropp.schedule.build import build
from zeropp.schedule.event_loop import run
from zeropp.schedule.program import Op, StageCost

TABLE = Path(__file__).parents[2] / "results" / "reference" / "schedules.csv"
ROWS = list(csv.DictReader(TABLE.open()))
SIZES = [
    (size, list(rows)) for size, rows in groupby(ROWS, lambda r: (r["ranks"], r["microbatches"]))
]


@pytest.mark.parametrize(("size", "rows"), SIZES, ids=lambda x: "x".join(x) if len(x) == 2 else "")
def test_zeropp_has_the_best_step(size: tuple[str, str], rows: list[dict[str, str]]) -> None:
    """Within the activations of 1F1B's first rank, at every number of chunks."""
    for chunks in ("2", "4"):
        here = [r for r in rows if r["chunks"] == chunks]
        best = min(float(r["step_over_ideal"]) for r in here if r["schedule"] != "ZeroPP")
        ours = [
            float(r["step_over_ideal"]) / min(best, float(r["bound"]))
            for r in here
            if r["schedule"] == "ZeroPP" and float(r["activations_over_1f1b"]) <= 1.0
        ]
        assert ours
        assert max(ours) <= 1.0


@pytest.mark.parametrize(("size", "rows"), SIZES[:6:2], ids=lambda x: "")
def test_the_rows_are_what_the_generator_makes(
    size: tuple[str, str], rows: list[dict[str, str]]
) -> None:
    ours = [row for row in rows if row["schedule"] == "ZeroPP"]
    assert ours
    for row in ours:
        ranks, m, chunks = int(row["ranks"]), int(row["microbatches"]), int(row["chunks"])
        schedule = build(
            "zeropp", num_ranks=ranks, chunks=chunks, num_microbatches=m, unit=int(row["unit"])
        )
        lowered = lower(schedule, gather=True)
        step = run(lowered, [StageCost()] * schedule.num_stages).over_ideal
        gathers = max(sum(a.op is Op.UNSHARD for a in p) for p in lowered.programs)
        assert (f"{step:.4f}", gathers) == (row["step_over_ideal"], int(row["gathers_per_step"]))
