"""``python -m benchmarks.report [RUNS...] --out DIR``: tables, figures and a page of records.

``--compare A B`` reports instead what changed between two sets of runs.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.records.record import check_writable
from benchmarks.report.compare import write_comparison
from benchmarks.report.write import write_report
from benchmarks.specification.run_spec import SpecError


def main() -> int:
    """Command line; exit status 1 where there was nothing to report, 2 on a path that is none or
    that cannot be written to."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.report",
        description="Tables, figures and a page of records, or what changed between two sets.",
        epilog="example: python -m benchmarks.report results/reference/demo --out /tmp/report",
    )
    parser.add_argument(
        "runs", nargs="*", type=Path, help="records or directories (default: results/runs)"
    )
    parser.add_argument(
        "--compare", nargs=2, type=Path, metavar=("A", "B"), help="two sets of runs: before, after"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        default=Path("results/reports/latest"),
        help="folder to write to (%(default)s)",
    )
    arguments = parser.parse_args()
    if arguments.compare and arguments.runs:
        parser.error("--compare takes both sets itself: give no RUNS beside it")
    for path in [*arguments.runs, *(arguments.compare or [])]:
        if not path.exists():
            print(f"error: {path}: no such file or directory", file=sys.stderr)
            return 2
    try:
        check_writable("--out", arguments.out)
    except SpecError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if arguments.compare:
        before, after = arguments.compare
        return 0 if write_comparison([before], [after], arguments.out) else 1
    runs = arguments.runs or [Path("results/runs")]
    return 0 if write_report(runs, arguments.out).files else 1


if __name__ == "__main__":
    sys.exit(main())
