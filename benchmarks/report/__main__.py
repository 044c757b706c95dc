"""``python -m benchmarks.report [RUNS...] --out DIR``: tables and figures of records."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.report import write_report


def main() -> int:
    """Command line; exit status 1 where there was no record to report."""
    parser = argparse.ArgumentParser(prog="benchmarks.report", description=__doc__)
    parser.add_argument(
        "runs", nargs="*", type=Path, help="records or directories (default: results/runs)"
    )
    parser.add_argument("--out", type=Path, default=Path("results/reports/latest"))
    arguments = parser.parse_args()
    missing = [path for path in arguments.runs if not path.exists()]
    if missing:
        print(f"error: RUNS={missing[0]}: no such file or directory", file=sys.stderr)
        return 2
    paths = write_report(arguments.runs or [Path("results/runs")], arguments.out)
    return 0 if paths.files else 1


if __name__ == "__main__":
    sys.exit(main())
