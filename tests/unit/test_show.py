"""benchmarks.show: a grid for what can be shown."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.show import main, parse, show


def test_a_picture_of_the_user_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks.show", "schedule", f"out={tmp_path / 'out'}"])
    assert [main(), main()] == [0, 0]  # its own pictures are
    (tmp_path / "out" / ".timeline.json").unlink()
    (tmp_path / "out" / "timeline.png").write_text("a photograph")
    assert main() == 2
    assert "out/timeline.json: is of no report" in capsys.readouterr().err
    assert (tmp_path / "out" / "timeline.png").read_text() == "a photograph"


@pytest.mark.parametrize(("width", "row"), [(200, "rank 1   ·  1F0 1F1"), (80, "rank 1  ·FF")])
def test_the_grid_fits_where_it_can(width: int, row: str) -> None:
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=True, color_system=None)
    show(*parse(["name=1f1b", "ranks=4", "microbatches=8"]), console)
    lines = re.sub(r"\x1b\[[\d;]*m", "", out.getvalue()).splitlines()
    assert lines[1].startswith(row)
    assert max(map(len, lines)) <= width


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_long_grid_is_folded(is_terminal: bool) -> None:
    out = io.StringIO()
    console = Console(file=out, width=80, force_terminal=is_terminal, color_system=None)
    show(*parse(["name=gpipe", "ranks=4", "microbatches=64"]), console)
    lines = re.sub(r"\x1b\[[\d;]*m", "", out.getvalue()).splitlines()
    assert max(map(len, lines)) <= (80 if is_terminal else 120)
    cells = "".join(line.removeprefix("rank 2  ") for line in lines if line.startswith("rank 2"))
    assert cells.count("F") == cells.count("B") + cells.count("I") == 64


def test_a_schedule_as_torchs_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "schedule --as torch name=zeropp ranks=2 chunks=2 microbatches=8 unit=4"
    monkeypatch.setattr(sys, "argv", ["benchmarks.show", *words.split()])
    assert main() == 0
    written, notes = capsys.readouterr()
    rows = [row.split(",") for row in written.splitlines()]
    assert [row[0] for row in rows] == ["0UNSHARD", "1UNSHARD"]
    assert rows[1].count("3REDUCE_GRAD") == 2  # two units
    assert "gathered chunks resident        2 (ZeroPP's engine: 2)" in notes
