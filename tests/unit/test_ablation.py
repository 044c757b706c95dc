"""Ablations: every configuration of a sweep beside a base that one can name."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from rich.console import Console

from benchmarks.launch.attempt import plan_summary
from benchmarks.launch.points import plan_point
from benchmarks.report import Options
from benchmarks.report.frame import latest_ok, load_frame
from benchmarks.report.speedup import ablation_figure, ablation_table, ablations
from benchmarks.report.write import write_one_table
from benchmarks.specification import SpecError
from benchmarks.specification.run_spec import spec_from_mapping
from tests.unit.synthetic_records import make_record, spec_values, write_records


def sweep(root: Path) -> pd.DataFrame:
    """Units 2, 4 and 16 with and without recomputation: six points that were planned for real;
    the unit of 16 is cut to the 8 microbatches of a step."""
    records = []
    for number, unit in enumerate((2, 4, 16)):
        for recompute in ("none", "full"):
            knobs = {"name": "zeropp", "pp": 2, "shard": 2, "chunks": 2}
            knobs |= {"unit": unit, "recompute": recompute}
            point = plan_point(spec_from_mapping(spec_values() | {"contender": knobs}))
            assert point.plan is not None
            step = 1.0 - 0.1 * number + (0.3 if recompute == "full" else 0.0)
            fields = {"plan": plan_summary(point.plan)}
            records.append(make_record(step_s=[step] * 6, fields=fields, contender_knobs=knobs))
    write_records(records, root)
    return latest_ok(load_frame([root])[0])


def test_six_points_are_six_rows_and_one_figure(tmp_path: Path) -> None:
    rows = sweep(tmp_path / "runs")
    table = ablation_table(rows, Options(against={"unit": "2", "recompute": "none"}))
    assert len(table.data) == 6
    changes = dict(zip(table.data["change"], table.data["speedup"], strict=True))
    assert changes["base"] == 1.0
    assert changes["unit 2 → 4"] == pytest.approx(1 / 0.9)
    assert changes["recompute none → full"] == pytest.approx(1 / 1.3)
    found = ablations(rows, {"unit": "2"})
    assert any("16 (run as 8)" in change for change in found["change"])
    assert sum("U=16 (run as 8)" in layout for layout in found["layout"]) == 2
    with pytest.raises(SpecError, match=r"there are unit .*16 \(run as 8\).*, recompute"):
        ablation_table(rows, Options(against={"unit": "3"}))
    (picture,) = ablation_figure(rows)
    assert len(picture.figure.axes[0].patches) == 6
    options, quiet = Options(), Console(quiet=True)
    write_one_table(
        "ablation", [tmp_path / "runs"], out=tmp_path / "out", options=options, console=quiet
    )
    assert len(pd.read_csv(tmp_path / "out" / "ablation.csv")) == 6


def test_no_sweep_is_a_header_alone(tmp_path: Path) -> None:
    write_records([make_record()], tmp_path)
    rows = latest_ok(load_frame([tmp_path])[0])
    assert ablation_table(rows).data.empty
    assert list(ablation_figure(rows)) == []
    assert "change" in ablation_table(rows).numbers.columns
