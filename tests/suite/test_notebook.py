"""The notebooks run from top to bottom, and the report of a large set of records stays within
bounds of figures, page size and memory."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from tests.unit.synthetic_records import make_record, write_records

ROOT = Path(__file__).resolve().parents[2]


def count_images(outputs: list[dict[str, object]]) -> int:
    return sum("image/png" in output.get("data", {}) for output in outputs)  # type: ignore[operator]


def table_in(output: dict[str, object]) -> list[list[str]]:
    """The words of every line of a frame that a cell shows; empty for another output."""
    data = output.get("data", {})
    is_frame = "text/html" in data  # type: ignore[operator]
    text = "".join(data["text/plain"]) if is_frame else ""  # type: ignore[index]
    return [line.split() for line in text.splitlines()]


def run(notebook: str, records: Path, made: Path) -> list[dict[str, object]]:
    """The outputs of a notebook, by the command of docs/report.md with other records."""
    arguments = ["--to", "ipynb", "--execute", "--run-path", "."]
    arguments += [f"notebooks/{notebook}.py", "--output"]
    done = subprocess.run(
        [sys.executable, "-m", "jupytext", *arguments, str(made)],
        cwd=ROOT,
        env=os.environ | {"ZEROPP_RECORDS": str(records)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    cells = json.loads(made.read_text())["cells"]
    return [output for cell in cells for output in cell.get("outputs", [])]


def test_notebook_runs_on_records(tmp_path: Path) -> None:
    steps = {"zeropp": [1.0] * 7, "deepspeed_3d": [2.0, 2.0, 4.0, 4.0, 4.0, 8.0, 8.0]}
    records = [make_record(c, num_gpus=n, step_s=steps[c]) for c in steps for n in (4, 8)]
    write_records(records, tmp_path / "runs")
    outputs = run("compare", tmp_path / "runs", tmp_path / "compare.ipynb")
    text = "".join("".join(output.get("text", "")) for output in outputs)  # type: ignore[arg-type]
    assert "4 configurations, 1 models" in text
    assert text.count("median") == 4
    assert "| GPT tiny |" in json.dumps(outputs, ensure_ascii=False)
    assert count_images(outputs) >= 6
    tables = [table for output in outputs if (table := table_in(output))]
    assert ["0", "gpt_tiny", "4", "zeropp", "2.0", "6.0"] in tables[2]  # halves of 3 and 4 steps
    assert ["0", "gpt_tiny", "4", "zeropp"] in [row[:4] for row in tables[1]]  # not 4.0 ranks


@pytest.mark.parametrize("notebook", ["compare", "verdict"])
def test_cells_of_the_verdict_are_kept_apart(tmp_path: Path, notebook: str) -> None:
    """Batches, clusters and bases were mixed (4.27 for ratios from 1.01 to 1.33), halves of a
    simulated step were nan, and sections without a figure were empty."""
    plans = pd.read_csv(ROOT / "results" / "reference" / "claim_33" / "plans.csv")
    few = plans["num_gpus"].eq(8) & plans["contender"].isin(["zeropp", "deepspeed_3d"])
    (tmp_path / "runs").mkdir()
    plans[few].to_csv(tmp_path / "runs" / "plans.csv", index=False)
    outputs = run(notebook, tmp_path / "runs", tmp_path / "made.ipynb")
    words = [{k: v for k, v in o.get("data", o).items() if k != "image/png"} for o in outputs]  # type: ignore[attr-defined]
    text = json.dumps(words)
    assert not re.search(r"\bnan\b", text, flags=re.IGNORECASE)
    own = plans[few & (plans["mode"] == "best") & (plans["bandwidth"] == 1.0)]
    steps = own.pivot(index=["num_gpus", "global_batch"], columns="contender", values="step_s")
    for ratio in (steps["deepspeed_3d"] / steps["zeropp"]).dropna():
        assert f"{ratio:.2f}".rstrip("0") in text
    if notebook == "verdict":
        assert count_images(outputs) == 1
    else:
        assert "have nothing to draw under Loss" in text


RECORDS = 72
REPORT = """
import sys
from pathlib import Path
from rich.console import Console
from benchmarks.report.write import write_report
made = write_report([Path(sys.argv[1])], Path(sys.argv[2]), Console(quiet=True))
print(len(made.skipped), *(path.suffix for path in made.files))
print(next(line for line in open("/proc/self/status") if line.startswith("VmHWM:")).split()[1])
"""


def test_every_record_is_read_and_figures_page_and_memory_are_bounded(tmp_path: Path) -> None:
    """24 kinds of cells in three batch sizes each. A few files are no records."""
    kinds = [
        json.loads(json.dumps(vars(make_record(c, m, n)), default=vars))
        for c in ("zeropp", "deepspeed_3d", "torch_pp", "fsdp")
        for m in ("gpt_tiny", "gpt_1_5b")
        for n in (4, 16, 64)
    ]
    texts = ["{", "{}", '{"schema_version": 7}']
    for number in range(RECORDS):
        record = kinds[number % len(kinds)]
        spec = record["spec"] | {"global_batch": 16 * (1 + number // len(kinds))}
        texts.append(json.dumps(record | {"record_id": str(number), "spec": spec}))
    for number, text in enumerate(texts):
        (tmp_path / "runs" / str(number)).mkdir(parents=True)
        (tmp_path / "runs" / str(number) / "record.json").write_text(text)
    done = subprocess.run(
        [sys.executable, "-c", REPORT, str(tmp_path / "runs"), str(tmp_path / "out")],
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    (skipped, *suffixes), (peak_kb,) = map(str.split, done.stdout.splitlines())
    assert skipped == "3"
    assert 5 < suffixes.count(".png") < 20
    assert (tmp_path / "out" / "report.html").stat().st_size < 5 * 2**20
    assert int(peak_kb) * 1024 < 2**28
    assert (tmp_path / "out" / "throughput.csv").read_text().count("\n") == RECORDS + 1
