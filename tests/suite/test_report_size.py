"""A large set of records: its report stays within bounds of figures, page size and memory.

How long it takes is not asserted: ``benchmarks.studies.report_speed`` measures it.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from benchmarks.records.record import find_records
from benchmarks.studies.report_speed import Effort, copy_records
from tests.unit.synthetic_records import make_record, write_records

RECORDS = 240
_SCRIPT = """
import json, sys
from dataclasses import asdict
from pathlib import Path
from benchmarks.studies.report_speed import effort_of
print(json.dumps(asdict(effort_of(Path(sys.argv[1]), Path(sys.argv[2])))))
"""


@pytest.fixture(scope="module")
def effort(tmp_path_factory: pytest.TempPathFactory) -> Effort:
    """24 kinds of cells in ten batch sizes each, reported by a process of its own. A few files are
    no records."""
    root = tmp_path_factory.mktemp("large")
    kinds = [
        make_record(c, m, n)
        for c in ("zeropp", "deepspeed_3d", "torch_pp", "fsdp")
        for m in ("gpt_tiny", "gpt_1_5b")
        for n in (4, 16, 64)
    ]
    sources = list(find_records([write_records(kinds, root / "kinds")]))
    copy_records(sources, RECORDS, root / "runs")
    for number, text in enumerate((sources[0].read_text()[:5000], "{}", '{"schema_version": 7}')):
        (root / "runs" / f"{number:05}" / "record_other.json").write_text(text)
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, str(root / "runs"), str(root / "out")],
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    return Effort(**json.loads(done.stdout))


def test_every_record_is_read_and_what_is_none_is_skipped(effort: Effort) -> None:
    assert (effort.records, effort.skipped) == (RECORDS, 3)


def test_figures_page_and_memory_are_bounded(effort: Effort) -> None:
    assert 5 < effort.figures < 20
    assert effort.page_bytes < 5 * 2**20
    assert effort.peak_bytes < 2**28
