"""validation.since: errors at an earlier commit and today are of the same rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.specification.run_spec import SpecError
from benchmarks.studies.validation.since import errors_since, main
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


def test_a_row_without_an_earlier_prediction_does_not_count(tmp_path: Path) -> None:
    write_table(tmp_path, *TODAY, name="validation.csv")
    unpredicted = NUMBER | {"place": "new", "predicted": "", "relative_error": ""}
    write_table(tmp_path, *EARLIER, unpredicted, name="earlier.csv")
    whole = next(line for line in errors_since(tmp_path) if line["source"] == "all sources")
    assert whole["rows"] == "2"


def test_out_is_written_to_another_folder_than_the_one_read(tmp_path: Path) -> None:
    write_table(tmp_path, *TODAY, name="validation.csv")
    write_table(tmp_path, *EARLIER, name="earlier.csv")
    out = tmp_path / "new" / "since.csv"
    assert main(["--from", str(tmp_path), "--out", str(out)]) == 0
    assert "all sources" in out.read_text(encoding="utf-8")


def test_a_folder_without_the_files_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--from", str(tmp_path)]) == 2
    message = capsys.readouterr().err
    assert "earlier.csv: cannot be read: no such file" in message
    assert len(message.splitlines()) == 1


def test_a_place_that_holds_another_number_is_an_error(tmp_path: Path) -> None:
    write_table(tmp_path, *TODAY, name="validation.csv")
    write_table(tmp_path, EARLIER[0] | {"value": "7"}, name="earlier.csv")
    with pytest.raises(SpecError, match=r"earlier\.csv: a is another row in validation\.csv"):
        errors_since(tmp_path)
