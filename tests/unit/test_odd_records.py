"""Odd values: what one record holds ends no report, and what is written is JSON and LaTeX for every
program that reads them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.records.record import GateCheck, GateResult, read_record
from benchmarks.report import TABLES
from benchmarks.report.frame import latest_ok, load_frame
from benchmarks.report.write import make_table, write_report
from tests.unit.report_frames import QUIET, failed
from tests.unit.synthetic_records import make_record, write_records


def refuse(word: str) -> None:
    raise AssertionError(f"{word} is no JSON")


def test_numbers_that_are_not_finite_are_null_and_read_back(tmp_path: Path) -> None:
    check = GateCheck(kind="loss (sgd)", worst="", step=2, error=math.inf, limit=1e-4)
    errors: dict[str, Any] = {
        "loss_error": math.inf,
        "grad_norm_error": math.nan,
        "parameter_error": 1.0,
    }
    gate = GateResult(passed=False, tolerance=1e-4, shape="gpt_tiny", checks=[check], **errors)
    fields = {"gate": gate, "losses": [5.0, math.nan], **failed("failed", "gate")}
    path = tmp_path / "record.json"
    make_record(fields=fields).write(path)
    json.loads(path.read_text(), parse_constant=refuse)
    record = read_record(path)
    assert record.gate is not None
    assert record.gate.words().startswith("gate: loss (sgd) differs")
    assert math.isnan(record.losses[1])


def test_the_page_holds_json_whatever_records_hold(tmp_path: Path) -> None:
    """JavaScript's JSON.parse refuses Infinity, and all that stood below it did not run."""
    record = make_record(spans=False)
    path = write_records([record], tmp_path / "runs") / record.record_id / "record.json"
    values = json.loads(path.read_text())
    values["plan"]["odd"] = math.inf  # as an older suite wrote it
    path.write_text(json.dumps(values))
    write_report([tmp_path / "runs"], tmp_path / "out", QUIET)
    page = (tmp_path / "out" / "report.html").read_text()
    sources = page.partition('id="sources">')[2].partition("</script>")[0]
    assert record.record_id in json.loads(sources, parse_constant=refuse)


ODD: dict[str, Callable[[dict[str, Any]], None]] = {
    "a step of 0 s": lambda r: r.update(step_s=[0.0, 1.0]),
    "a negative step": lambda r: r.update(step_s=[-1.0] * 7),
    "a plan that is no mapping": lambda r: r["plan"].update(layout="pp=2"),
    "a plan of words": lambda r: r["plan"]["layout"].update(pp="two"),
    "memory of words": lambda r: r["plan"].update(predicted_memory=[{"parameters": "much"}]),
    "an odd date": lambda r: r.update(ended_at="yesterday"),
    "spans of words": lambda r: r.update(spans=[["a"]]),
    "a tolerance of words": lambda r: r["spec"]["measure"].update(gate_tolerance="small"),
    "variables that are no mapping": lambda r: r["ranks"][0]["environment"].update(variables=3),
    "no layers": lambda r: r["spec"]["model"].update(layers="many"),
}


@pytest.mark.parametrize("name", ODD)
def test_an_odd_value_leaves_one_record_out(tmp_path: Path, name: str) -> None:
    """Each of them ended the whole report, or all of ``status``, with a traceback."""
    for contender in ("zeropp", "deepspeed_3d"):
        write_records([make_record(contender)], tmp_path)
    path = next(tmp_path.glob("*zeropp*/*/record.json"))
    values = json.loads(path.read_text())
    ODD[name](values)
    path.write_text(json.dumps(values))
    frame, skipped = load_frame([tmp_path])
    rows = latest_ok(frame)
    for table_name in TABLES:
        make_table(table_name, rows)
    assert list(rows["contender"]) == ["deepspeed_3d"]
    (line,) = skipped
    assert line.startswith(f"{path}: ")
    assert "\n" not in line
