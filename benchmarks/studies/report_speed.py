"""How much a report of many records takes: processor time, memory, figures, size of the page.

The records of a folder are copied under other global batches until there are enough of them, and
one report of all is written. Prints one JSON object.

    python -m benchmarks.studies.report_speed results/reference/demo --records 5000
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import process_time

from rich.console import Console

from benchmarks.records.record import find_records
from benchmarks.report.write import write_report
from benchmarks.specification.command import run_command
from benchmarks.specification.run_spec import SpecError


@dataclass(frozen=True, kw_only=True)
class Effort:
    """What one report took. ``peak_bytes`` is of the whole process, ``skipped`` counts files that
    were no records."""

    records: int
    skipped: int
    figures: int
    page_bytes: int
    peak_bytes: int
    processor_s: float


def copy_records(sources: Sequence[Path], number: int, runs: Path) -> None:
    """Write ``number`` records into ``runs``: each source in turn, every round in other cells."""
    texts = [path.read_text() for path in sources]
    for index in range(number):
        document = json.loads(texts[index % len(texts)])
        document["spec"]["global_batch"] *= 1 + index // len(texts)
        document["record_id"] = str(index)
        folder = runs / f"{index:05}"
        folder.mkdir(parents=True)
        (folder / "record.json").write_text(json.dumps(document))


def effort_of(runs: Path, out: Path) -> Effort:
    """Report on all records below ``runs`` into ``out``."""
    before = process_time()
    made = write_report([runs], out, Console(quiet=True))
    seconds = process_time() - before
    return Effort(
        records=sum(1 for _ in find_records([runs])) - len(made.skipped),
        skipped=len(made.skipped),
        figures=sum(path.suffix == ".png" for path in made.files),
        page_bytes=(out / "report.html").stat().st_size,
        peak_bytes=_peak_bytes(),
        processor_s=round(seconds, 2),
    )


def _peak_bytes() -> int:
    """The largest resident set that this process had. (``getrusage`` would also count that of the
    process which started it, because Linux keeps the larger one when a program is executed.)"""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def main() -> int:
    """Command line; see the top of this file."""
    return run_command(_main)


def _main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", type=Path, help="records to copy")
    parser.add_argument("--records", type=int, default=5000, help="how many copies")
    asked = parser.parse_args()
    sources = list(find_records([asked.runs]))
    if not sources:
        raise SpecError(f"{asked.runs}: no records")
    with tempfile.TemporaryDirectory() as scratch:
        copy_records(sources, asked.records, Path(scratch) / "runs")
        print(json.dumps(asdict(effort_of(Path(scratch) / "runs", Path(scratch) / "out"))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
