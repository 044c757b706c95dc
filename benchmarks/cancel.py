"""Cancels the Slurm jobs of points that wait or run: of a whole folder, or by key."""

from __future__ import annotations

import sys

from benchmarks.specification.command import CommandParser, command
from benchmarks.status import add_points, points_of


@command
def main() -> int:
    """Run the command line; the exit status is 1 if Slurm did not answer or refused."""
    parser = CommandParser(
        prog="zeropp cancel",
        description="Cancel the Slurm jobs of points that wait or run. The same command that "
        "submitted them submits them again.",
        epilog="example: zeropp cancel results/runs contender=fsdp num_gpus=32,64",
    )
    add_points(parser)
    runs_dir, chosen = points_of(parser.parse_intermixed_args().points)
    from benchmarks.launch.slurm.client import SlurmError, call  # not for --help
    from benchmarks.launch.slurm.submissions import query_slurm
    from benchmarks.launch.sweep_status import UNDER_WAY, sweep_status

    points = sweep_status(runs_dir, chosen).points
    try:
        view = query_slurm(runs_dir)
        ids = {point.spec_id for point in points}
        jobs = [p.job for p in view.points if p.job in view.queued and p.spec_id in ids]
        if jobs:
            call("scancel", *jobs)
    except SlurmError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{len(jobs)} job{'s' * (len(jobs) != 1)} cancelled")
    for point in points:
        if point.state in UNDER_WAY and not point.job:
            print(f"  left alone  {point.spec_id}: {point.detail or point.state} (no job of Slurm)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
