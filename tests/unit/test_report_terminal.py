"""What a report prints: all of its text on terminals of every width, and where the page is."""

from __future__ import annotations

import io
from collections import Counter
from pathlib import Path

import pandas as pd
import pytest
from rich.console import Console

from benchmarks.report import TABLES, Options
from benchmarks.report.frame import latest_ok
from benchmarks.report.speedup import headline_table
from benchmarks.report.table import MISSING, print_table
from benchmarks.report.write import make_table, write_one_table
from tests.unit.report_frames import failed, frame_of
from tests.unit.synthetic_records import make_record, write_records

REASON = "contender.pp=3: the degrees pp=3 x shard=auto must multiply to num_gpus=4"
REASON += " (/a/folder/with/a-long-name/of-an-attempt)"


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> pd.DataFrame:
    records = [make_record(c, num_gpus=n) for c in ("zeropp", "deepspeed_3d") for n in (4, 8)]
    records.append(make_record(attempt="local-2", fields=failed("infeasible", REASON)))
    for unit in (4, 8):
        plan = {"plan": records[0].plan | {"unit": unit}}
        knobs = {"pp": 2, "chunks": 2, "unit": unit}
        records.append(make_record(contender_knobs=knobs, fields=plan))
    knobs = {"pp": 3, "chunks": 2}
    records.append(make_record(contender_knobs=knobs, fields=failed("infeasible", REASON)))
    records.append(make_record(provenance="simulated", attempt="simulate-1", step_s=[0.1]))
    return latest_ok(frame_of(*records, root=tmp_path_factory.mktemp("runs")))


@pytest.mark.parametrize("name", TABLES)
def test_no_letter_is_lost(rows: pd.DataFrame, name: str) -> None:
    table = headline_table(rows) if name == "paper" else make_table(name, rows)  # as commands do
    cells = " ".join(cell.text for row in table.grid().rows for cell in row)
    for width in range(60, 180, 8):
        file = io.StringIO()
        print_table(table, Console(file=file, width=width), most=12)
        printed = file.getvalue()
        assert max(map(len, printed.splitlines())) <= width
        if len(table.data) <= 12:
            lost = Counter(cells) - Counter(printed)
            assert {*lost} <= {" ", MISSING, ",", ";"}, width


def test_the_last_line_is_the_path_of_the_page(tmp_path: Path) -> None:
    out = tmp_path / "/".join(["a-folder-with-a-long-name"] * 4)
    file = io.StringIO()
    runs = write_records([make_record()], tmp_path / "runs")
    write_one_table(
        "throughput", [runs], out=out, options=Options(), console=Console(file=file, width=80)
    )
    last = file.getvalue().splitlines()[-1]
    assert last == f"{out / 'throughput.html'} (and 4 other files in its folder)"
