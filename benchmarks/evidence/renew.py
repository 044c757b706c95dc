"""Makes the committed tables of results/reference again, one study after the other, in an hour.

A study that was stopped keeps the rows that it has written, and goes on from there when the command
is given again with ``--only`` and a part of its table's path. `git diff` shows what has changed.

    python -m benchmarks.evidence.renew --only validation
"""

from __future__ import annotations

import shutil
import subprocess
import sys

from benchmarks import CHECKOUT
from benchmarks.specification import SpecError
from benchmarks.specification.command import CommandParser, command

REFERENCE = CHECKOUT / "results" / "reference"
# The module and the arguments that write each table.
STUDIES = {
    "memory/traced_vs_simulated.csv": ("benchmarks.evidence.traced", "memory"),
    "validation/validation.csv": ("benchmarks.validation", "--out", f"{REFERENCE}/validation"),
    "validation/strangers.csv": (
        *("benchmarks.validation.strangers", "--out", f"{REFERENCE}/validation"),
    ),
    "claim_33/plans.csv": (
        *("benchmarks.run", "experiment=claim_33", f"report_dir={REFERENCE}/claim_33"),
        "rerun=all",
    ),
    "atlas/plans.csv": (
        *("benchmarks.run", "experiment=atlas", f"report_dir={REFERENCE}/atlas"),
        "rerun=all",
    ),
    "README.md and docs": ("docs.make",),
}


@command
def main() -> int:
    """Command line; see ``--help``."""
    parser = CommandParser(
        prog="python -m benchmarks.evidence.renew",
        description="Make the committed tables again, and then the pages that quote them.",
    )
    parser.add_argument("--only", default="", metavar="PART", help="tables with this in their path")
    only = parser.parse_args().only
    chosen = {path: words for path, words in STUDIES.items() if only in path}
    if not chosen:
        raise SpecError(f"--only={only}: no such table (known: {', '.join(STUDIES)})")
    for path, words in chosen.items():
        print(f"{path}: python -m {' '.join(words)}", flush=True)
        status = subprocess.run([sys.executable, "-m", *words], cwd=CHECKOUT).returncode
        if status:
            return status
        if path == "claim_33/plans.csv":  # without what is drawn beside: ``docs.make`` draws that
            folder = REFERENCE / "claim_33"
            for picture in (*folder.glob("*.png"), *folder.glob("*.pdf")):
                picture.unlink()
            shutil.rmtree(folder / "paper", ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
