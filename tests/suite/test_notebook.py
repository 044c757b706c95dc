"""The notebook runs from top to bottom."""

from __future__ import annotations

from pathlib import Path

import jupytext
import pytest
from nbclient import NotebookClient

from tests.unit.synthetic_records import make_record, write_records

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "notebooks" / "compare.py"


def test_notebook_runs_on_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = [make_record(c, num_gpus=n) for c in ("zeropp", "deepspeed_3d") for n in (4, 8)]
    write_records(records, tmp_path)
    monkeypatch.setenv("ZEROPP_RECORDS", str(tmp_path))
    book = jupytext.read(SOURCE)
    NotebookClient(book, timeout=120, resources={"metadata": {"path": str(ROOT)}}).execute()
    outputs = [output for cell in book.cells if cell.cell_type == "code" for output in cell.outputs]
    text = "".join(output.get("text", "") for output in outputs)
    assert "4 records, 0 files skipped" in text
    assert "ZeroPP, measured: 1.3" in text
    images = [output for output in outputs if "image/png" in output.get("data", {})]
    assert len(images) >= 4  # throughput, memory, timeline, loss
