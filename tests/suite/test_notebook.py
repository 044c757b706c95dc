"""The notebook: its two forms hold the same cells, and it runs from top to bottom."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import jupytext

from tests.unit.synthetic_records import make_record, write_records

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "notebooks" / "compare.py"
EXECUTED = ROOT / "notebooks" / "compare.ipynb"


def outputs_of(path: Path) -> list[dict[str, object]]:
    cells = json.loads(path.read_text())["cells"]
    return [output for cell in cells for output in cell.get("outputs", [])]


def count_images(outputs: list[dict[str, object]]) -> int:
    return sum("image/png" in output.get("data", {}) for output in outputs)  # type: ignore[operator]


def test_both_forms_have_the_same_cells() -> None:
    """Where this fails: make the .ipynb again, docs/report.md says how."""
    source, executed = jupytext.read(SOURCE), jupytext.read(EXECUTED)
    assert [(c.cell_type, c.source) for c in source.cells] == [
        (c.cell_type, c.source) for c in executed.cells
    ]


def test_committed_outputs_are_whole_and_name_no_machine() -> None:
    outputs = outputs_of(EXECUTED)
    code = [c for c in jupytext.read(EXECUTED).cells if c.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert {output["output_type"] for output in outputs} <= {
        "display_data",
        "execute_result",
        "stream",
    }
    assert count_images(outputs) >= 6
    assert EXECUTED.stat().st_size < 2**20
    text = EXECUTED.read_text()
    assert not [start for start in ("/home/", "/root/", "/work/", "/tmp/") if start in text]


def test_notebook_runs_on_records(tmp_path: Path) -> None:
    """The command of docs/report.md, with other records and another output."""
    records = [make_record(c, num_gpus=n) for c in ("zeropp", "deepspeed_3d") for n in (4, 8)]
    write_records(records, tmp_path / "runs")
    made = tmp_path / "compare.ipynb"
    arguments = ["--to", "ipynb", "--execute", "--run-path", "."]
    arguments += ["notebooks/compare.py", "--output"]
    done = subprocess.run(
        [sys.executable, "-m", "jupytext", *arguments, str(made)],
        cwd=ROOT,
        env=os.environ | {"ZEROPP_RECORDS": str(tmp_path / "runs")},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    outputs = outputs_of(made)
    text = "".join("".join(output.get("text", "")) for output in outputs)  # type: ignore[arg-type]
    assert "4 configurations, 1 models" in text
    assert text.count("median") == 4
    assert "| GPT tiny |" in json.dumps(outputs, ensure_ascii=False)
    assert count_images(outputs) >= 6
