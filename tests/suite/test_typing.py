"""A type checker finds wrong arguments of ``parallelize``, and passes right ones."""

from __future__ import annotations

from pathlib import Path

from mypy import api

CALLS = Path(__file__).parents[1] / "typing" / "arguments.py"


def test_mypy_finds_every_wrong_call_and_no_other() -> None:
    assert CALLS.read_text().count("# type: ignore[") == 6
    output, problems, status = api.run(["--strict", "--config-file=", str(CALLS)])
    assert not problems
    assert status == 0, output
    assert "Success: no issues found in 1 source file" in output
