"""benchmarks.status: every point in one line, with what there is to say of it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.launch.points import Point, attempt_directory, write_unstarted
from benchmarks.specification.run_spec import spec_from_mapping
from benchmarks.status import main
from tests.unit.toy_spec import mapping


def printed(
    runs_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> list[str]:
    monkeypatch.setattr(sys, "argv", ["benchmarks.status", str(runs_dir)])
    assert main() == 0
    return capsys.readouterr().out.splitlines()


def test_a_line_a_point_and_only_columns_with_something_in_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = spec_from_mapping(mapping())
    reason = "contender.pp=3: " + "a long reason, " * 9
    write_unstarted(
        Point(spec, None), tmp_path, launcher="local", status="infeasible", reason=reason
    )
    heading, row, counts = printed(tmp_path, monkeypatch, capsys)
    assert heading.split() == ["point", "state", "detail"]
    assert row.split()[:2] == [spec.spec_id, "infeasible"]
    assert row.strip().endswith(reason.strip())
    assert counts == "1 infeasible"


def test_nothing_was_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert printed(tmp_path, monkeypatch, capsys) == [f"no points in {tmp_path}"]


def test_an_attempt_that_is_under_way_counts_before_one_that_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = spec_from_mapping(mapping())
    write_unstarted(
        Point(spec, None), tmp_path, launcher="slurm", status="failed", reason="not submitted"
    )
    attempt_directory(spec, tmp_path, "local")
    _, row, counts = printed(tmp_path, monkeypatch, capsys)
    assert row.split()[:3] == [spec.spec_id, "running", "starting"]
    assert counts == "1 running"
