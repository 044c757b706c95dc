"""Records that an older version of the suite wrote, whose spec has other keys than today's.

``records/older.json`` is made by hand: of today's keys its cluster and contender lack some, and
have others that are gone.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from rich.console import Console

from benchmarks.launch.points import records_of
from benchmarks.launch.standing import standing
from benchmarks.records.record import read_record
from benchmarks.report.frame import latest_ok, load_frame
from benchmarks.report.tables import memory_table
from benchmarks.report.write import write_report
from benchmarks.specification.run_spec import SpecError, spec_from_mapping
from tests.unit.synthetic_records import make_record, write_records

OLDER = Path(__file__).parent / "records" / "older.json"


def with_spec(root: Path, **changes: Any) -> Path:
    """The older record with other keys of its spec; None takes one away."""
    document = json.loads(OLDER.read_text())
    spec = document["spec"] | changes
    document["spec"] = {key: value for key, value in spec.items() if value is not None}
    path = root / "record.json"
    path.write_text(json.dumps(document))
    return path


def test_it_is_no_spec_of_today() -> None:
    with pytest.raises(SpecError, match=r"has no such knob|missing"):
        spec_from_mapping(read_record(OLDER).spec)


def test_nothing_that_was_measured_is_hidden(tmp_path: Path) -> None:
    frame, skipped = load_frame([OLDER])
    assert skipped == []
    row = frame.iloc[0]
    assert (row["model"], row["cluster"], row["contender"]) == ("gpt_tiny", "cpu_gloo", "zeropp")
    assert row["step_s"] == 0.2
    assert row["tokens_per_s_per_gpu"] == 16 * 64 / 0.2 / 4
    assert row["model_tflops_per_gpu"] > 0
    assert row["layout"] == "PP2 V2 ZeRO-3x2 U2 lookahead 3"  # a knob of then
    assert row["peak_gib"] == pytest.approx(14802944 / 2**30)
    assert write_report([OLDER], tmp_path, Console(quiet=True)).skipped == []
    assert "lookahead" in (tmp_path / "report.html").read_text()


def test_it_stands_beside_todays(tmp_path: Path) -> None:
    write_records([make_record("deepspeed_3d", step_s=[0.4] * 6)], tmp_path)
    frame, _ = load_frame([tmp_path, OLDER])
    assert len(latest_ok(frame)) == 2
    assert frame["num_gpus"].nunique() == frame["global_batch"].nunique() == 1


def test_what_is_not_known_is_left_out(tmp_path: Path) -> None:
    document = json.loads(OLDER.read_text())["spec"]
    model = {key: value for key, value in document["model"].items() if key != "ffn"}
    frame, skipped = load_frame([with_spec(tmp_path, model=model, cluster={"name": "then"})])
    assert skipped == []
    row = frame.iloc[0]
    assert row["tokens_per_s_per_gpu"] == 16 * 64 / 0.2 / 4
    assert all(pd.isna(row[name]) for name in ("model_tflops_per_gpu", "mfu", "memory_limit_gib"))
    assert "device limit [GiB]" not in memory_table(frame).grid().heads


def test_a_spec_that_names_no_cell_is_skipped_by_name(tmp_path: Path) -> None:
    path = with_spec(tmp_path, num_gpus=None)
    frame, skipped = load_frame([path])
    assert frame.empty
    assert skipped == [f"{path}: spec.num_gpus: missing; it has no default"]


def test_the_suite_finds_it_by_its_name(tmp_path: Path) -> None:
    record = read_record(OLDER)
    record.write(tmp_path / record.record_id / "record.json")
    (row,) = standing(tmp_path).rows
    assert (row.spec_id, row.state) == (record.spec_id, "ok")
    today = spec_from_mapping(make_record().spec)
    assert list(records_of(today, tmp_path)) == []  # another name: it is measured once more
