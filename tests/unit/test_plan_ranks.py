"""The place of the measured best among the simulator's choices."""

from __future__ import annotations

import csv
from pathlib import Path

from benchmarks.studies import plan_ranks


def run(tp: int, measured: float, predicted: float, **changed: str) -> dict[str, str]:
    """A published run as ``validation.csv`` has it."""
    row = dict.fromkeys((*plan_ranks.COLUMNS, *plan_ranks._PLAN), "")
    row |= {"schedule": "1f1b", "program": "p", "compiled": "", "zero3_group": "", "cp": "1"}
    row |= {"source": "s", "metric": "step_time", "role": "fitted", "first_of_run": "yes"}
    return row | {"tp": str(tp), "value": str(measured), "predicted": str(predicted), **changed}


def test_rank_and_loss() -> None:
    runs = [run(1, 1.0, 1.2), run(2, 1.1, 1.1), run(4, 2.0, 2.0)]
    (group,) = plan_ranks.groups(runs)
    row = plan_ranks.row_of(group)
    assert (row["rank"], row["behind_percent"], row["plans"]) == (2, 10.0, 3)
    assert row["predicted_best"] == "tp=2"


def test_rates_are_better_if_they_are_higher() -> None:
    runs = [run(1, 10, 9, metric="tokens_per_s"), run(2, 8, 10, metric="tokens_per_s")]
    (group,) = plan_ranks.groups(runs)
    row = plan_ranks.row_of(group)
    assert (row["rank"], row["behind_percent"]) == (2, 25.0)


def test_groups_need_different_degrees_of_one_task() -> None:
    same = [run(1, 1.0, 1.0), run(1, 1.1, 1.1, micro_batch="2")]
    other = [run(1, 1.0, 1.0), run(2, 1.0, 1.0, num_gpus="8")]
    unpriced = [run(1, 1.0, 1.0), run(2, 1.0, 1.0) | {"predicted": ""}]
    for runs in (same, other, unpriced):
        assert list(plan_ranks.groups(runs)) == []


def test_the_committed_table_is_that_of_the_committed_predictions(tmp_path: Path) -> None:
    (tmp_path / "validation").symlink_to(plan_ranks.REFERENCE / "validation")
    plan_ranks.main(tmp_path)
    made, committed = (
        list(csv.DictReader((folder / "plan_ranks.csv").open(newline="")))
        for folder in (tmp_path, plan_ranks.REFERENCE)
    )
    assert made == committed
    assert len(made) > 30
