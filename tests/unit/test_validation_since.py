"""validation.since: errors at an earlier commit and today are of the same rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.specification.run_spec import SpecError
from benchmarks.studies.validation.since import errors_since
from tests.unit.published_cells import CELLS, write_table

TODAY = [
    CELLS | {"place": "a", "predicted": "1.65", "relative_error": "0.1"},
    CELLS | {"place": "b", "seq": "1024", "predicted": "1.2", "relative_error": "-0.2"},
    CELLS | {"place": "new", "seq": "512", "predicted": "3.0", "relative_error": "1.0"},
]
NUMBER = {name: CELLS[name] for name in ("metric", "value", "unit")}
EARLIER = [
    NUMBER | {"place": "a", "predicted": "1.95", "relative_error": "0.3"},
    NUMBER | {"place": "b", "predicted": "0.75", "relative_error": "-0.5"},
]


def test_only_rows_that_both_files_predict_count(tmp_path: Path) -> None:
    write_table(tmp_path, *TODAY, name="validation.csv")
    write_table(tmp_path, *EARLIER, name="earlier.csv")
    whole = next(line for line in errors_since(tmp_path) if line["source"] == "all sources")
    assert (whole["kind"], whole["rows"], whole["runs"]) == ("throughput", "2", "2")
    assert (whole["median_then"], whole["p90_then"]) == ("0.4000", "0.4800")
    assert (whole["median_now"], whole["p90_now"]) == ("0.1500", "0.1900")


def test_a_place_that_holds_another_number_is_an_error(tmp_path: Path) -> None:
    write_table(tmp_path, *TODAY, name="validation.csv")
    write_table(tmp_path, EARLIER[0] | {"value": "7"}, name="earlier.csv")
    with pytest.raises(SpecError, match=r"earlier\.csv: a is another row in validation\.csv"):
        errors_since(tmp_path)
