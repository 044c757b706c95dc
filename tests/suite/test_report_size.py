"""A large set of records: its report stays within bounds of figures, page size and memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.unit.synthetic_records import make_record

RECORDS = 72
REPORT = """
import sys
from pathlib import Path
from rich.console import Console
from benchmarks.report.write import write_report
made = write_report([Path(sys.argv[1])], Path(sys.argv[2]), Console(quiet=True))
print(len(made.skipped), *(path.suffix for path in made.files))
print(next(line for line in open("/proc/self/status") if line.startswith("VmHWM:")).split()[1])
"""


def test_every_record_is_read_and_figures_page_and_memory_are_bounded(tmp_path: Path) -> None:
    """24 kinds of cells in three batch sizes each. A few files are no records."""
    kinds = [
        json.loads(json.dumps(vars(make_record(c, m, n)), default=vars))
        for c in ("zeropp", "deepspeed_3d", "torch_pp", "fsdp")
        for m in ("gpt_tiny", "gpt_1_5b")
        for n in (4, 16, 64)
    ]
    texts = ["{", "{}", '{"schema_version": 7}']
    for number in range(RECORDS):
        record = kinds[number % len(kinds)]
        spec = record["spec"] | {"global_batch": 16 * (1 + number // len(kinds))}
        texts.append(json.dumps(record | {"record_id": str(number), "spec": spec}))
    for number, text in enumerate(texts):
        (tmp_path / "runs" / str(number)).mkdir(parents=True)
        (tmp_path / "runs" / str(number) / "record.json").write_text(text)
    done = subprocess.run(
        [sys.executable, "-c", REPORT, str(tmp_path / "runs"), str(tmp_path / "out")],
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    (skipped, *suffixes), (peak_kb,) = map(str.split, done.stdout.splitlines())
    assert skipped == "3"
    assert 5 < suffixes.count(".png") < 20
    assert (tmp_path / "out" / "report.html").stat().st_size < 5 * 2**20
    assert int(peak_kb) * 1024 < 2**28
    assert (tmp_path / "out" / "throughput.csv").read_text().count("\n") == RECORDS + 1
