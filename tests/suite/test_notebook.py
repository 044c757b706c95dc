"""The notebook runs from top to bottom."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.unit.synthetic_records import make_record, write_records

ROOT = Path(__file__).resolve().parents[2]


def outputs_of(path: Path) -> list[dict[str, object]]:
    cells = json.loads(path.read_text())["cells"]
    return [output for cell in cells for output in cell.get("outputs", [])]


def count_images(outputs: list[dict[str, object]]) -> int:
    return sum("image/png" in output.get("data", {}) for output in outputs)  # type: ignore[operator]


def table_in(output: dict[str, object]) -> list[list[str]]:
    """The words of every line of a frame that a cell shows; empty for another output."""
    data = output.get("data", {})
    is_frame = "text/html" in data  # type: ignore[operator]
    text = "".join(data["text/plain"]) if is_frame else ""  # type: ignore[index]
    return [line.split() for line in text.splitlines()]


def test_notebook_runs_on_records(tmp_path: Path) -> None:
    """The command of docs/report.md, with other records and another output."""
    steps = {"zeropp": [1.0] * 7, "deepspeed_3d": [2.0, 2.0, 4.0, 4.0, 4.0, 8.0, 8.0]}
    records = [make_record(c, num_gpus=n, step_s=steps[c]) for c in steps for n in (4, 8)]
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
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    outputs = outputs_of(made)
    text = "".join("".join(output.get("text", "")) for output in outputs)  # type: ignore[arg-type]
    assert "4 configurations, 1 models" in text
    assert text.count("median") == 4
    assert "| GPT tiny |" in json.dumps(outputs, ensure_ascii=False)
    assert count_images(outputs) >= 6
    tables = [table for output in outputs if (table := table_in(output))]
    assert ["0", "gpt_tiny", "4", "zeropp", "2.0", "6.0"] in tables[2]  # halves of 3 and 4 steps
    assert ["0", "gpt_tiny", "4", "zeropp"] in [row[:4] for row in tables[1]]  # not 4.0 ranks
