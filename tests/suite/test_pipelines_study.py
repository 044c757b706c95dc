"""What the study of pipelines on CPUs makes of its samples, and what it refuses before it runs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.studies.pipelines_on_cpu import Found, StepSample, main, rows


def rank(scale: float) -> Found:
    """What a rank found in three steps per way to train; CPU seconds are multiples of a scale."""
    samples = {
        "torch PP": [StepSample(step_s, 4.0 * scale, 3.0 * scale) for step_s in (2.0, 6.0, 4.0)],
        "ZeroPP": [StepSample(2.0, cpu_s * scale, scale) for cpu_s in (2.0, 1.0, 9.0)],
        "alone": [StepSample(1.0, scale, scale / 2) for _ in range(3)],
    }
    counts = {"torch PP": {"unshard": 8, "reduce_grad": 4}, "ZeroPP": {"unshard": 12}}
    return samples, counts


def test_rows_are_medians_ratios_and_sums_over_ranks() -> None:
    torch_pp, zeropp, alone = rows([rank(1.0), rank(10.0)], steps=4)
    assert [row["way"] for row in (torch_pp, zeropp, alone)] == ["torch PP", "ZeroPP", "alone"]
    assert torch_pp["step_s"] == {"median": 4.0, "q1": 2.0, "q3": 6.0}
    assert torch_pp["torch_pp_over_it"] == {"median": 1.0, "q1": 1.0, "q3": 1.0}
    assert zeropp["torch_pp_over_it"] == {"median": 2.0, "q1": 1.0, "q3": 3.0}
    cpu = [(row["cpu_s_of_all_ranks"], row["cpu_s_of_main_threads"]) for row in (torch_pp, zeropp)]
    assert cpu == [(44.0, 33.0), (22.0, 11.0)]
    assert (torch_pp["gathers_per_step"], torch_pp["reductions_per_step"]) == (2.0, 1.0)
    assert (zeropp["gathers_per_step"], zeropp["reductions_per_step"]) == (3.0, 0.0)
    assert (alone["gathers_per_step"], alone["cpu_s_of_all_ranks"]) == (0.0, 11.0)


@pytest.mark.parametrize("repeats", ["1", "0", "-3", "two", "2.5"])
def test_too_few_repeats_are_refused_before_anything_runs(
    repeats: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "out.json"
    monkeypatch.setattr(sys, "argv", ["study", "--out", str(out), f"--repeats={repeats}"])
    assert main() == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: argument --repeats: invalid ")
    assert not out.exists()
