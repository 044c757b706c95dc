"""The committed tables are what today's code computes, and an altered one is noticed."""

from __future__ import annotations

import csv
import json
import re
import subprocess
from pathlib import Path

import pytest

from benchmarks.records.environment import Code
from benchmarks.studies.recheck import tables as module
from benchmarks.studies.recheck.__main__ import REFERENCE, main
from benchmarks.studies.recheck.tables import TABLES, Table, differences, moved, same


def test_a_sample_of_every_committed_table_is_what_the_code_computes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    status = main([])
    said = capsys.readouterr().out
    assert [table.path for table in TABLES if table.path not in said] == []
    assert status == 0, said


def test_simulated_memory_is_that_of_the_traced_ranks() -> None:
    """DeepSpeed is traced with models of some MiB, of which a few tensors are a few percent."""
    limits = {"zeropp": 0.03, "torch_pp": 0.03, "fsdp": 0.01, "deepspeed_3d": 0.08}
    with (REFERENCE / "memory/traced_vs_simulated.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["contender"] for row in rows} == set(limits)
    off = [row for row in rows if abs(float(row["relative_error"])) > limits[row["contender"]]]
    assert off == []


# A number of each table that is made larger by a percent.
ALTERED = {
    "schedules.csv": "step_over_ideal",
    "memory/traced_vs_simulated.csv": "simulated_total_gib",
    "validation/validation.csv": "predicted",
    "validation/errors.csv": "p90",
    "validation/since.csv": "p90_now",
    "claim_33/plans.csv": "step_s",
    "claim_33/verdict.csv": "zeropp_tokens_per_s_per_gpu",
}


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.path)
def test_an_altered_number_is_noticed(
    table: Table, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copied(tmp_path, table)
    if table.path in ALTERED:
        _alter(tmp_path / table.path, ALTERED[table.path])
    else:
        _claim_a_better_bound(tmp_path / table.path)
    assert main(["--only", table.path, "--reference", str(tmp_path), "--rows", "1"]) == 1
    assert f"{table.path}: 1 of 1 rows differ" in capsys.readouterr().out


def copied(folder: Path, table: Table) -> None:
    """Copy a table, and those from which others follow, into a folder."""
    sources = ("claim_33/plans.csv", "validation/validation.csv", "validation/earlier.csv")
    for path in {table.path, *sources}:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text((REFERENCE / path).read_text())


def table_at(path: str) -> Table:
    (table,) = (table for table in TABLES if table.path == path)
    return table


@pytest.mark.parametrize(
    "path",
    [
        "memory/traced_vs_simulated.csv",
        "validation/validation.csv",
        "validation/errors.csv",
        "claim_33/verdict.csv",
    ],
)
def test_a_row_that_was_taken_out_is_missed(path: str, tmp_path: Path) -> None:
    table = table_at(path)
    copied(tmp_path, table)
    assert table.missing(tmp_path) == []
    head, first, *rest = (tmp_path / path).read_text().splitlines(keepends=True)
    assert rest
    (tmp_path / path).write_text("".join([head, *rest]))
    (gone,) = table.missing(tmp_path)
    assert all(word in first for word in gone.split())


@pytest.mark.parametrize(
    ("path", "column"),
    [
        ("memory/traced_vs_simulated.csv", "traced_activations_gib"),
        ("memory/traced_vs_simulated.csv", "traced_total_gib"),
        ("validation/errors.csv", "median"),
        ("validation/errors.csv", "runs"),
        ("validation/since.csv", "p90_then"),
        ("validation/validation.csv", "value"),
    ],
)
def test_numbers_of_every_kind_are_computed_again(path: str, column: str) -> None:
    table = table_at(path)
    row = next(row for row in table.read(REFERENCE) if row[column].replace(".", "").isdigit())
    assert not differences(row, table.again(row, REFERENCE))
    altered = row | {column: f"{1.1 * float(row[column]) + 1:.4f}"}
    assert differences(altered, table.again(altered, REFERENCE))


def test_a_count_of_sizes_or_misses_is_computed_again() -> None:
    table = table_at("schedule_orders.json")
    row = table.read(REFERENCE)[0]
    assert not differences(row, table.again(row, REFERENCE))
    for altered in (row | {"sizes": "13681"}, row | {"missed": "1"}, row | {"largest": "1.01"}):
        assert differences(altered, table.again(altered, REFERENCE))


def test_the_page_says_how_many_rows_of_each_table_are_drawn() -> None:
    page = (REFERENCE.parents[1] / "docs" / "metrics.md").read_text()
    stated = {
        path: rows
        for paths, rows in re.findall(r"^\| (`[^|]*) \| (\w+) \|", page, re.M)
        for path in re.findall(r"`([^`]*)`", paths)
    }
    drawn = {table.path: table.rows for table in TABLES}
    assert {path: "all" if rows >= 1000 else str(rows) for path, rows in drawn.items()} == stated


def _alter(path: Path, column: str) -> None:
    """Leave one row, with a wrong number."""
    rows = csv.DictReader(path.read_text().splitlines())
    row = next(row for row in rows if row[column].replace(".", "").isdigit())
    row[column] = f"{1.01 * float(row[column]):.6g}"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(row))
        writer.writeheader()
        writer.writerow(row)


def _claim_a_better_bound(path: Path) -> None:
    document = json.loads(path.read_text())
    document["bound"]["largest_over_bound"] = 0.5
    path.write_text(json.dumps(document))


@pytest.mark.parametrize(
    ("stored", "computed", "equal"),
    [
        ("1.3750", "1.3750", True),
        ("1.3750", "1.37504", True),
        ("1.3750", "1.3752", False),
        ("2", "3", False),
        ("OOM", "fits", False),
        ("", "0.0", False),
        ("1338.88", "1338.8811", True),
    ],
)
def test_rounding_is_no_difference(stored: str, computed: str, equal: bool) -> None:
    assert same(stored, computed) is equal


def test_what_moved_is_said_in_a_line_per_column() -> None:
    old = [{"plan": "a", "step_s": "1.0"}, {"plan": "b", "step_s": "2.0"}]
    new = [{"plan": "a", "step_s": "1.5"}, {"plan": "c", "step_s": "2.0"}]
    assert list(moved(old, new, ["plan"])) == [
        "1 rows removed, 1 added",
        "step_s: 1 of 2 rows differ, by 50.00% at most",
    ]


def test_a_renewal_goes_on_where_it_was_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of three studies is stopped: only it and the third run again, the second without
    the words that would throw away the rows that it has."""
    tables = [
        Table(
            path=name,
            keys=("key",),
            rows=1,
            again=lambda row, reference: {},
            command=(name,),
            anew=("anew",),
        )
        for name in "abc"
    ]
    for name in "abc":
        (tmp_path / name).write_text("key,value\n1,2\n")
    ran: list[list[str]] = []
    stopped = ["b"]

    def run(words: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        ran.append(words[2:])
        return subprocess.CompletedProcess(words, 130 if words[2] in stopped else 0)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(module, "read_code", lambda ask_git: Code("", False, "digest"))
    assert module.renew(tables, tmp_path, REFERENCE) == 1
    stopped.clear()
    assert module.renew(tables, tmp_path, REFERENCE) == 0
    assert ran == [["a", "anew"], ["b", "anew"], ["b"], ["c", "anew"]]
    said = capsys.readouterr().out
    assert "ended with status 130" in said
    assert "renewed before by this version" in said
    monkeypatch.setattr(module, "read_code", lambda ask_git: Code("", False, "another"))
    assert module.renew(tables[:1], tmp_path, REFERENCE) == 0
    assert ran[-1] == ["a", "anew"]


def test_the_verdict_s_pictures_go_where_the_pages_show_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, images = tmp_path / "reference", tmp_path / "docs" / "images"
    (home / "claim_33" / "paper").mkdir(parents=True)
    images.mkdir(parents=True)
    (home / "claim_33" / "plans.csv").write_text("key,value\n1,2\n")
    (home / "claim_33" / "losses.png").write_bytes(b"picture")
    (home / "claim_33" / "losses.svg").write_text("drawing")
    table = Table(
        path="claim_33/plans.csv",
        keys=("key",),
        rows=1,
        again=lambda row, reference: {},
        command=("claim_33",),
    )
    done: subprocess.CompletedProcess[str] = subprocess.CompletedProcess([], 0)
    monkeypatch.setattr(subprocess, "run", lambda words, **_: done)
    monkeypatch.setattr(module, "read_code", lambda ask_git: Code("", False, "digest"))
    monkeypatch.setattr(module, "CHECKOUT", tmp_path)
    assert module.renew([table], home, home) == 0
    assert [path.name for path in images.iterdir()] == ["claim_33_losses.png"]
    assert [path.name for path in (home / "claim_33").iterdir()] == ["plans.csv"]
