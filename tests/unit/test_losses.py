"""Runs whose losses leave the band have failed; runs without the usual gate are marked."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.records.events import measured
from benchmarks.records.losses import Losses, apart_from_others, beyond
from benchmarks.records.recorded_spec import unchecked
from benchmarks.report.charts import throughput_bars
from benchmarks.report.frame import latest_ok
from benchmarks.report.speedup import headline_table
from benchmarks.report.table import markdown
from benchmarks.report.tables import paper_grids, paper_table, throughput_table
from tests.unit.report_frames import frame_of
from tests.unit.synthetic_records import make_record

RIGHT = [5.5, 5.2, 5.0]


def test_a_loss_beyond_the_band_is_named_with_its_step() -> None:
    assert beyond([5.5, 5.21, 5.0], RIGHT, "fp32") == ""
    assert beyond([5.5, 5.2, 8.99], RIGHT, "fp32").startswith("step 3: loss 8.9900, but 5.0000")
    assert beyond([5.5, float("nan")], RIGHT, "bf16").startswith("step 2")


def test_a_loss_that_is_no_number_is_wrong_without_anything_to_compare_with() -> None:
    assert beyond([5.5, float("nan")], [], "fp32") == "step 2: loss nan is not a finite number"
    assert beyond([5.5, float("inf")], [5.5, float("inf")], "fp32").startswith("step 2")


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_loss_that_is_no_number_is_no_failure_of_the_others(place: int) -> None:
    values = [[5.5, 5.2], [5.5, 5.2]]
    values.insert(place, [5.5, float("nan")])
    for several in (values, values[:2], values[1:]):
        runs = [Losses("same", str(n), "fp32", losses) for n, losses in enumerate(several)]
        wrong = [n for n, losses in enumerate(several) if losses[1] != 5.2]
        assert list(apart_from_others(runs)) == wrong


def test_the_one_that_differs_from_the_others_is_wrong_and_of_two_nobody_knows() -> None:
    def runs(**values: list[float]) -> list[Losses]:
        return [Losses("same", name, "fp32", losses) for name, losses in values.items()]

    wrong = [5.5, 5.2, 8.99]
    assert list(apart_from_others(runs(a=RIGHT, b=wrong, c=RIGHT))) == [1]
    assert list(apart_from_others(runs(a=RIGHT, b=wrong))) == [0, 1]
    assert apart_from_others(runs(a=wrong)) == {}
    assert apart_from_others(runs(a=RIGHT, b=RIGHT[:2])) == {}


def test_a_run_beyond_the_band_is_a_failure_in_tables(tmp_path: Path) -> None:
    losses = {"zeropp": [5.5, 5.2, 8.99], "deepspeed_3d": RIGHT, "fsdp": RIGHT}
    records = [make_record(name, fields={"losses": each}) for name, each in losses.items()]
    rows = latest_ok(frame_of(*records, root=tmp_path)).set_index("contender")
    assert list(rows["status"][["deepspeed_3d", "fsdp", "zeropp"]]) == ["ok", "ok", "failed"]
    assert "loss 8.9900" in rows["reason"]["zeropp"]
    assert rows.loc[["zeropp"], ["step_s", "tokens_per_s_per_gpu", "mfu"]].isna().all(axis=None)


@pytest.mark.parametrize("measure", [{"gate": False}, {"gate_tolerance": 0.01}])
def test_a_run_without_the_usual_gate_is_marked_wherever_it_is_shown(
    tmp_path: Path, measure: dict[str, object]
) -> None:
    assert unchecked({"measure": measure})
    records = [make_record("zeropp", measure=measure), make_record("deepspeed_3d")]
    rows = latest_ok(frame_of(*records, root=tmp_path))
    mark = "NOT COMPARED with one process as usual: ZeroPP (measure.gate"
    grids = [*paper_grids(paper_table(rows)), headline_table(rows).grid()]
    for grid in (*grids, throughput_table(rows).grid()):
        assert mark in markdown(grid)
    assert mark in next(throughput_bars(rows)).shown


def test_a_run_with_the_usual_gate_is_not_marked() -> None:
    assert unchecked({"measure": {"gate": True, "gate_tolerance": 1e-4}}) == unchecked({}) == ""


def test_a_record_says_how_many_steps_were_compared() -> None:
    compared = measured({0: [{"event": "losses", "error": 1e-6, "steps": 5}]})
    assert (compared["loss_error"], compared["loss_steps"]) == (1e-6, 5)
    assert measured({0: []})["loss_error"] is None
