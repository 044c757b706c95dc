"""benchmarks.status: every point with its state, and the reason of those that did not end well."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from benchmarks.launch import sweep_status
from benchmarks.launch.attempt import Ending, new_header, started, write_unstarted
from benchmarks.records.events import EventWriter
from benchmarks.specification.run_spec import spec_from_mapping
from benchmarks.status import main
from tests.unit.slurm_attempts import RUNNING, submitted, view_of
from tests.unit.toy_spec import changed, mapping


def printed(
    runs_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *words: str,
    expect: int = 0,
) -> list[str]:
    monkeypatch.setattr(sys, "argv", ["benchmarks.status", str(runs_dir), *words])
    assert main() == expect
    return capsys.readouterr().out.splitlines()


def sweep_of_layers_and_batches(runs_dir: Path) -> None:
    """Four points that ended ok, but with layers=8 batch=16 one that failed."""
    for layers, batch in product((4, 8), (8, 16)):
        spec = spec_from_mapping(changed("model.layers", layers) | {"global_batch": batch})
        ending = Ending("failed", "rank 0: no") if layers * batch == 128 else Ending("ok")
        write_unstarted(spec, runs_dir, new_header("local"), ending)


REASON = "contender.pp=3: " + "a long reason with /a/path/that/no/line/holds/" + "x" * 60


def test_a_reason_has_a_line_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = spec_from_mapping(mapping())
    write_unstarted(spec, tmp_path, new_header("local"), Ending("infeasible", REASON))
    row, reason, counts = printed(tmp_path, monkeypatch, capsys)
    assert row.split()[:3] == [spec.spec_id, "infeasible", "measured,"]
    assert row.endswith((" 0 s ago", " 1 s ago"))
    assert reason == f"    {REASON}"
    assert counts == "1 infeasible"


@pytest.mark.parametrize("columns", [80, 120])
def test_a_terminal_folds_between_words_and_never_into_a_narrow_column(
    columns: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    terminal = {"COLUMNS": str(columns), "FORCE_COLOR": "1", "NO_COLOR": "1", "TERM": "xterm"}
    for name, value in terminal.items():
        monkeypatch.setenv(name, value)
    reason = "rank 1: RuntimeError: " + "expected all tensors on one device " * 9
    spec = spec_from_mapping(mapping())
    header = new_header("local")
    write_unstarted(spec, tmp_path, header, Ending("failed", f"{reason}{REASON}"))
    first, *folded, long, counts = printed(tmp_path, monkeypatch, capsys)
    assert first.split()[:2] == [spec.spec_id, "failed"]
    assert 3 <= len(folded) <= 2 + len(reason) // (columns - 20)
    assert all(line.startswith("    ") and len(line) <= columns for line in folded)
    assert " ".join([*folded, long]).split() == f"{reason}{REASON}".split()
    assert long.split() == [REASON.split()[-1]]  # a word that is too long stays whole
    assert counts == "1 failed"


def test_an_attempt_that_is_under_way_counts_before_one_that_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = spec_from_mapping(mapping())
    write_unstarted(spec, tmp_path, new_header("slurm"), Ending("failed", "not submitted"))
    with started(spec, new_header("local"), tmp_path) as attempt:
        EventWriter(attempt, 0).write("step", index=7, seconds=1.0)
        row, log, counts = printed(tmp_path, monkeypatch, capsys)
    assert log == f"    {attempt / 'rank_000.log'}"
    assert row.split()[:4] == [spec.spec_id, "running", "step", "7"]
    assert "s ago" in row  # of a point that hangs, this is what shows it
    assert counts == "1 running"


def test_a_suspended_job_is_not_said_to_run(
    attempt: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    submitted(attempt, "7")
    job = replace(RUNNING, state="SUSPENDED")
    monkeypatch.setattr(sweep_status, "query_slurm", lambda runs_dir: view_of(attempt, job))
    row, _, counts = printed(attempt.parents[1], monkeypatch, capsys)
    assert row.split()[:4] == [attempt.parent.name, "suspended", "step", "0"]
    assert row.endswith("ago, 9:00 left, job 7_0, on node7")
    assert counts == "1 suspended"


def test_a_point_without_a_plan_is_gone_once_a_search_has_found_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = spec_from_mapping(mapping() | {"contender": {"name": "zeropp", "pp": "auto"}})
    header = new_header("simulate")
    write_unstarted(asked, tmp_path, header, Ending("infeasible", "no choice fits"))
    assert "infeasible" in printed(tmp_path, monkeypatch, capsys)[0]
    write_unstarted(spec_from_mapping(mapping()), tmp_path, header, Ending("ok"))
    row, counts = printed(tmp_path, monkeypatch, capsys)
    assert (row.split()[1], counts) == ("ok", "1 ok")


def test_what_differs_between_points_names_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep_of_layers_and_batches(tmp_path)
    (tmp_path / "notes").mkdir()  # no point, and so not missing
    rows = printed(tmp_path, monkeypatch, capsys)
    named = sorted(" ".join(row.split()[2:4]) for row in rows if "-4gpu-" in row)
    pairs = ("4 global_batch=16", "4 global_batch=8", "8 global_batch=16", "8 global_batch=8")
    assert named == [f"model.layers={pair}," for pair in pairs]
    assert rows[-1] == "1 failed, 3 ok"
    told = json.loads("\n".join(printed(tmp_path, monkeypatch, capsys, "--json")))
    assert {"model.layers": "8", "global_batch": "16"} in [row["differs"] for row in told]


def test_what_follows_from_a_name_is_not_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = mapping()["model"] | {"name": "wide", "hidden": 128, "ffn": 512}
    for model in (mapping()["model"], other):
        spec = spec_from_mapping(mapping() | {"model": model})
        write_unstarted(spec, tmp_path, new_header("local"), Ending("ok"))
    rows = printed(tmp_path, monkeypatch, capsys)
    assert [row.split()[2] for row in rows[:-1]] == ["model=toy,", "model=wide,"]


@pytest.mark.parametrize(
    ("words", "counts", "code"),
    [
        (["--check"], "1 failed, 3 ok", 1),
        (["--check", "model.layers=4"], "2 ok", 0),
        (["measure.gate=True", "measure.gate_tolerance=1e-4", "model.layers=4"], "2 ok", 0),
        (["model.layers=", "--check"], "no points in", 1),
        (["--state", "lost"], "no points in", 0),
        (["contender=zeropp", "contender.pp=auto,2", "global_batch=8.0"], "2 ok", 0),
        (["notes", "model.layers=4"], "", 2),
        (["--check", "model.layers=4,8", "global_batch=16"], "1 failed, 1 ok", 1),
        (["--check", "--state", "ok"], "3 ok", 1),  # the state chooses rows, not what is checked
        (["--state", "failed"], "1 failed", 0),
        (["--check", "model=toy", "global_batch=32"], "no points in", 1),
        (["model.layer=4"], "", 2),
        (["--state", "broken"], "", 2),
    ],
)
def test_a_script_can_choose_points_and_check_them(
    words: list[str],
    counts: str,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    sweep_of_layers_and_batches(tmp_path)
    rows = printed(tmp_path, monkeypatch, capsys, *words, expect=code)
    assert "".join(rows[-1:]).startswith(counts)
    assert bool(rows) == bool(counts)


def test_a_watched_sweep_is_listed_again_when_it_changes_until_it_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = spec_from_mapping(mapping())
    with ExitStack() as running:
        running.enter_context(started(spec, new_header("local"), tmp_path))
        naps: list[float] = []

        def nap(seconds: float) -> None:
            naps.append(seconds)
            if len(naps) == 2:
                write_unstarted(spec, tmp_path, new_header("local"), Ending("ok"))
                running.close()

        monkeypatch.setattr("time.sleep", nap)
        rows = printed(tmp_path, monkeypatch, capsys, "--watch", "--check")
    assert ([row for row in rows if row.startswith("1 ")], len(naps)) == (["1 running", "1 ok"], 2)
