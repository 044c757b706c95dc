"""The script of the torchtitan example up to what it starts, with stubs in torch's place."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import CHECKOUT

# Checks versions as python does, writes a schedule, and prints a step in the place of training.
_PYTHON = f"""#!/bin/bash
case "$*" in
    -c*) exec {sys.executable} "$@" ;;
    *benchmarks.show*) echo "0F0" ;;
    *pipeline_parallel_schedule_csv*) echo "titan: step:  4  loss: 6.5  grad_norm:  1.25  tps: 9" ;;
    *) echo "titan: step:  4  loss: 6.5  grad_norm:  1.5  tps: 9" ;;
esac
"""


def example(place: Path, torch: str) -> subprocess.CompletedProcess[str]:
    """Run the script where torch has this version."""
    (place / "python").write_text(_PYTHON)
    (place / "python").chmod(0o755)
    for name, version in (("torch", torch), ("torchtitan", "0.3.0"), ("triton", "3.8.0")):
        (place / f"{name}.py").write_text(f"__version__ = {version!r}")
    return subprocess.run(
        ["bash", CHECKOUT / "scripts/examples/torchtitan/run.sh", place / "out"],
        env=os.environ | {"PATH": f"{place}:{os.environ['PATH']}", "PYTHONPATH": str(place)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("version", ["2.14.0", "2.14.1+cpu"])
def test_both_orders_are_run_with_the_torch_that_it_wants(tmp_path: Path, version: str) -> None:
    done = example(tmp_path, version)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "ZeroPP's order:",
        "step:  4  loss: 6.5  grad_norm:  1.25",
        "torchtitan's Interleaved1F1B:",
        "step:  4  loss: 6.5  grad_norm:  1.5",
    ]
    assert (tmp_path / "out" / "zeropp.csv").read_text() == "0F0\n"


@pytest.mark.parametrize("version", ["2.13.0", "2.15.0"])
def test_another_torch_is_named(tmp_path: Path, version: str) -> None:
    done = example(tmp_path, version)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"not the versions above: AssertionError: {version}\n"
