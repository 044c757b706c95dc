"""A report's folder belongs to one report, and an interruption leaves the last one whole."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.report.__main__ import main
from benchmarks.report.write import report_folder
from benchmarks.specification import SpecError
from tests.unit.synthetic_records import make_record, write_records


def names(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}


def write(folder: Path, *files: str) -> None:
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)


def test_stale_files_go_and_those_of_others_stay(tmp_path: Path) -> None:
    out = tmp_path / "out"
    write(out, "notes.txt")
    with report_folder(out) as folder:
        write(folder, "a.csv", "traces/b.json")
    with report_folder(out) as folder:
        write(folder, "a.csv", "c.csv")
    assert names(out) == {"notes.txt", "a.csv", "c.csv", ".report.json"}
    assert not (out / "traces").exists()
    assert list(tmp_path.iterdir()) == [out]  # nothing is left beside it


def test_a_file_of_another_is_never_replaced(tmp_path: Path) -> None:
    out = tmp_path / "out"
    write(out, "paper.tex")
    (out / "paper.tex").write_text("the paper itself")
    with pytest.raises(SpecError, match=r"out/paper.tex: is of no report"), report_folder(out) as f:
        write(f, "a.csv", "paper.tex")
    assert names(out) == {"paper.tex"}
    assert (out / "paper.tex").read_text() == "the paper itself"
    assert list(tmp_path.iterdir()) == [out]


def test_what_is_no_report_lies_beside_one(tmp_path: Path) -> None:
    for _ in range(2):
        with report_folder(tmp_path) as folder:
            write(folder, "report.html")
        with report_folder(tmp_path, ".timeline.json") as folder:
            write(folder, "timeline.png")
    assert names(tmp_path) == {"report.html", "timeline.png", ".report.json", ".timeline.json"}
    with pytest.raises(SpecError), report_folder(tmp_path, ".timeline.json") as folder:
        write(folder, "report.html")


def test_a_report_that_is_cut_off_is_replaced_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    with report_folder(out) as folder:
        write(folder, "a.csv")
    move, moved = Path.replace, list[Path]()

    def replace(path: Path, target: Path) -> Path:
        if path.suffix == ".csv":
            moved.append(target)
            if len(moved) == 2:
                raise KeyboardInterrupt
        return move(path, target)

    monkeypatch.setattr(Path, "replace", replace)
    with pytest.raises(KeyboardInterrupt), report_folder(out) as folder:
        write(folder, "b.csv", "c.csv")
    monkeypatch.undo()
    with report_folder(out) as folder:
        write(folder, "b.csv", "c.csv", "d.csv")
    assert names(out) == {"b.csv", "c.csv", "d.csv", ".report.json"}


def test_a_broken_list_of_files_is_as_none(tmp_path: Path) -> None:
    write(tmp_path, "a.csv")
    (tmp_path / ".report.json").write_text("null")
    with pytest.raises(SpecError, match=r"a.csv: is of no report"), report_folder(tmp_path) as f:
        write(f, "a.csv")


def interrupted_report(out: Path) -> None:
    with report_folder(out) as folder:
        write(folder, "b.csv")
        raise KeyboardInterrupt


def test_an_interruption_leaves_the_last_report_whole(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with report_folder(out) as folder:
        write(folder, "a.csv")
    with pytest.raises(KeyboardInterrupt):
        interrupted_report(out)
    assert names(out) == {"a.csv", ".report.json"}
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize(("steps", "status"), [(1.5, 1), (0.7, 0), (1.0, 0)])
def test_compare_ends_with_1_where_something_became_slower(
    steps: float, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, step in (("before", 1.0), ("after", steps)):
        write_records(
            [make_record(step_s=[step * (1 + 0.001 * i) for i in range(9)])], tmp_path / name
        )
    words = ["--compare", str(tmp_path / "before"), str(tmp_path / "after")]
    monkeypatch.setattr(sys, "argv", ["report", *words, "--out", str(tmp_path / "out")])
    assert main() == status
    assert "comparison.csv" in names(tmp_path / "out")
