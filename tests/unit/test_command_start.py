"""A command that answers at once imports nothing that only ranks and reports need."""

from __future__ import annotations

import subprocess
import sys

import pytest

SLOW = "pandas", "matplotlib", "torch", "scipy", "deepspeed"  # seconds of imports
ANSWERS = [  # a command line, and words of what it prints
    ("run --help", ["zeropp", "gpt_tiny", "benchmarks.tune"]),
    ("run --cfg job contender=zeropp", ["name: zeropp", "num_gpus: 4"]),
    ("tune --help", ["num_gpus: 64", "cluster=a800"]),
    ("show --help", ["name=zeropp", "reduce_grad"]),
    ("status --help", ["usage: ", "--json"]),
    ("validate --help", ["usage: ", "--cluster"]),
    ("report --help", ["usage: ", "--table"]),
]
RUN = f"""
import runpy, sys
module, sys.argv = sys.argv[1], sys.argv[1:]
try:
    runpy.run_module(module, run_name="__main__", alter_sys=True)
except SystemExit as end:
    assert not end.code, end.code
print(sorted({set(SLOW)} & set(sys.modules)), file=sys.stderr)
"""


@pytest.mark.parametrize(("command", "words"), ANSWERS, ids=[command for command, _ in ANSWERS])
def test_help_reads_well_and_imports_nothing_slow(command: str, words: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", RUN, *f"benchmarks.{command}".split()],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "[]\n")
    assert [word for word in words if word not in done.stdout] == []
