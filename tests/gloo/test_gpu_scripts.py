"""What runs first on a GPU (scripts/gpu), rehearsed on a CPU with a tiny model."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_a_lone_rank_is_measured_and_reported(tmp_path: Path) -> None:
    out, specs = tmp_path / "out", tmp_path / "specs"
    small = {"GPU_READY_SMALL": "1", "DS_ACCELERATOR": "cpu", "TORCHDYNAMO_DISABLE": "1"}
    places = {"OUT": str(out), "SPECS": str(specs), "TMPDIR": str(tmp_path)}
    variables = os.environ | small | places | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    variables |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    variables |= {"S": "400", "LONG": "300", "ONLY": "lone_a1 overlap"}
    freeze = [sys.executable, "scripts/gpu/specs.py", str(specs), "--small", "--only=a_zeropp"]
    for command in (freeze, ["bash", "scripts/gpu/run.sh"]):
        done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    assert not (out / "failed.txt").exists()
    steps = (out / "steps.log").read_text()
    assert "end lone_a1: 0" in steps
    assert "skip" not in steps
    with (out / "report" / "actions.csv").open(newline="") as file:
        rows = {row["action"]: row for row in csv.DictReader(file)}
    assert list(rows) == ["forward", "B + W", "update", "all"]
    assert all(float(row["measured_s"]) > 0 and not row["described_s"] for row in rows.values())
    assert "Described against" in (out / "summary.txt").read_text()
    assert (out / "all.tar.gz").is_file()
