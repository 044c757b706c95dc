"""Lists every point of every sweep with its state.

Attempts whose job ended without writing a record get one first, with the reason that Slurm gives.
"""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from pathlib import Path

from benchmarks.specification import SpecError
from benchmarks.specification.command import CommandParser, run_command

_WATCH_S = 10.0


def main() -> int:
    """Run the command line; the exit status is 1 if Slurm was needed and did not answer, and with
    ``--check`` unless every point that was chosen has ended well."""
    return run_command(_status)


def _status() -> int:
    parser = CommandParser(
        prog="zeropp status",
        description="List every point of every sweep with its state, and what differs between "
        "the points. Attempts whose job ended without writing a record get one first, with the "
        "reason that Slurm gives.",
        epilog="example: zeropp status results/runs model.layers=4,8 --state failed,missing",
    )
    add_points(parser)
    parser.add_argument("--state", default="", metavar="A,B", help="list only points in these")
    parser.add_argument("--watch", action="store_true", help="list again what changes, to the end")
    check = "exit status 1 unless every point (of the keys given) is ok or infeasible"
    parser.add_argument("--check", action="store_true", help=check)
    parser.add_argument("--json", action="store_true", help="the rows as JSON")
    arguments = parser.parse_intermixed_args()
    runs_dir, chosen = points_of(arguments.points)
    # Not for --help:
    from benchmarks.launch.sweep_status import (
        ENDED_WELL,
        STATES,
        UNDER_WAY,
        print_points,
        sweep_status,
    )

    asked = arguments.state.split(",") if arguments.state else STATES
    for state in asked:
        if state not in STATES:
            raise SpecError(f"--state={state}: must be among {', '.join(STATES)}")
    last = None
    while True:
        status = sweep_status(runs_dir, chosen)
        points = [point for point in status.points if point.state in asked]
        if (now := [(point.spec_id, point.state) for point in points]) != last:
            last = now
            if arguments.json:
                from benchmarks.records.record import json_text  # which needs the suite

                print(json_text([asdict(point) for point in points], indent=1), flush=True)
            elif not points:
                print(
                    f"no points in {runs_dir}"
                    + " that are asked for" * bool(chosen or arguments.state)
                )
            else:
                print_points(points)
            for note in status.notes:
                print(f"note: {note}", file=sys.stderr)
            if status.problem:
                print(f"error: Slurm could not be asked: {status.problem}", file=sys.stderr)
        if not arguments.watch or not any(point.state in UNDER_WAY for point in status.points):
            break
        time.sleep(_WATCH_S)
    ended_well = status.points and all(point.state in ENDED_WELL for point in status.points)
    return 1 if status.problem or (arguments.check and not ended_well) else 0


def add_points(parser: CommandParser) -> None:
    """Let a command take a folder of runs and keys that choose among its points."""
    words = "folder of runs (results/runs), and values that points must have: model.layers=4,8"
    parser.add_argument("points", nargs="*", metavar="RUNS_DIR | KEY=VALUE", help=words)


def points_of(words: list[str]) -> tuple[Path, dict[str, list[str]]]:
    """(the folder of runs, the values of each key) that a command line chooses. Raises SpecError
    for a folder that is not there, and for two."""
    folders = [word for word in words if "=" not in word or Path(word).is_dir()]
    pairs = [word.partition("=") for word in words if word not in folders]
    if len(folders) > 1:
        raise SpecError(f"{folders[1]}: give one folder of runs, and keys as KEY=VALUE")
    chosen = {key: value.split(",") for key, _, value in pairs}
    folder = Path(*(folders or ["results/runs"]))
    if not folder.is_dir():
        raise SpecError(f"{folder.absolute()}: no such folder; nothing was run yet")
    return folder.resolve(), chosen


if __name__ == "__main__":
    sys.exit(main())
