"""Lists every point of every sweep with its state.

Attempts whose job ended without writing a record get one first, with the reason that Slurm gives.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

from benchmarks.specification import SpecError
from benchmarks.specification.command import CommandParser, run_command


def main() -> int:
    """Run the command line; the exit status is 1 if Slurm was needed and did not answer."""
    return run_command(_status)


def _status() -> int:
    parser = CommandParser(
        prog="zeropp status",
        description="List every point of every sweep with its state. Attempts whose job ended "
        "without writing a record get one first, with the reason that Slurm gives.",
        epilog="example: zeropp status results/runs --json",
    )
    default = Path("results/runs")
    parser.add_argument(
        "runs_dir", type=Path, nargs="?", default=default, help="folder of runs (%(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="the rows as JSON")
    arguments = parser.parse_args()
    runs_dir = _folder(arguments.runs_dir)
    from benchmarks.launch.sweep_status import print_points, sweep_status  # not for --help

    status = sweep_status(runs_dir)
    if arguments.json:
        print(json.dumps([asdict(point) for point in status.points], indent=1))
    elif not status.points:
        print(f"no points in {runs_dir}")
    else:
        print_points(status.points)
    for note in status.notes:
        print(f"note: {note}", file=sys.stderr)
    if status.problem:
        print(f"error: Slurm could not be asked: {status.problem}", file=sys.stderr)
    return 1 if status.problem else 0


def _folder(path: Path) -> Path:
    """The folder itself; raises SpecError if there is none or if it cannot be read."""
    try:
        folder = path.resolve(strict=True)
        next(folder.iterdir(), None)
    except FileNotFoundError:
        raise SpecError(f"{path.absolute()}: no such folder; nothing was run yet") from None
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links
        why = (getattr(error, "strerror", "") or "a loop of links").lower()
        raise SpecError(f"{path.absolute()}: cannot be read: {why}") from None
    return folder


if __name__ == "__main__":
    sys.exit(main())
