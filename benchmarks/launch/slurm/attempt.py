"""Makes the record of an attempt from inside its job; an array's script calls it at its end.

The event files of the ranks say what was measured. If they do not say why the attempt stopped,
Slurm is asked, because a signal alone may mean the time limit, preemption or somebody's scancel.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.launch.finish import Ending, finish_attempt
from benchmarks.launch.frozen import DamagedError
from benchmarks.launch.slurm.client import (
    EndedJob,
    accounted,
    last_ending,
    limit_s,
    requeue,
    running_on,
    time_limit_s,
)
from benchmarks.launch.slurm.reasons import (
    before_ranks,
    ending_by_state,
    first_kill,
    is_complete,
    killed_with_its_shell,
    left_on_signal,
    memory_kill,
    slurm_of,
)
from benchmarks.launch.slurm.slurm_command import SlurmError
from benchmarks.records.record import RunRecord

_CLIENT_TIMEOUT_S = 5.0  # KillWait, 30 s by default, is all that a preempted job has
_LATE_S = 120.0  # USR1 may come a minute early, and ranks need some time to exit


@dataclass(frozen=True)
class ScriptEnd:
    """How the script ended, by its own account."""

    exit_code: int  # srun's, or that of the line that failed before it
    caught: str = ""  # USR1, TERM, or nothing
    stage: str = "ranks"  # "setup" if it ended before it started the ranks
    elapsed_s: float = 0.0  # since the script began


def close(directory: Path, end: ScriptEnd) -> RunRecord:
    """Write the record of an attempt whose script ends."""
    slurm = slurm_of(directory)
    ending = None if is_complete(directory) else _ending(directory, end)
    slurm |= {"exit_code": end.exit_code, "caught": end.caught}
    if neighbours := _neighbours(directory):
        slurm["neighbours"] = neighbours
    return finish_attempt(directory, ending=ending, slurm=slurm)


def _ending(directory: Path, end: ScriptEnd) -> Ending | None:
    """Why the attempt ended; None if the events of the ranks say it."""
    slurm = slurm_of(directory)
    job, ended = str(slurm["job"]), _word_of(slurm)
    return (
        memory_kill(directory)
        or (_by_state(ended, end.stage) if ended else None)
        or _time_limit(directory, job, end)
        or (None if end.caught else _killed(directory))
        or left_on_signal(directory, ended, end.caught)
        or before_ranks(directory, None, end.stage)
        or _failed_setup(directory, end, ended)
    )


def _killed(directory: Path) -> Ending | None:
    """The ending by a signal that killed a rank. If the script got one itself, this says nothing:
    the script passes it on to srun, which then kills the ranks, at times before they have noticed
    that signal."""
    return first_kill(directory) or killed_with_its_shell(directory)


def _by_state(ended: EndedJob, stage: str) -> Ending | None:
    ending = ending_by_state(ended)
    if ending is None or stage != "setup":
        return ending
    return replace(ending, reason=f"{ending.reason}, in setup")


def _word_of(slurm: Mapping[str, Any]) -> EndedJob | None:
    """The job's ending as Slurm knows it now. While a job leaves its nodes, slurmctld does not say
    why; accounting does, a moment later."""
    now = last_ending(str(slurm["job"]), _CLIENT_TIMEOUT_S)
    restart = slurm.get("restart")
    if now is None or now.word != "COMPLETING" or not isinstance(restart, int):
        return now
    for wait_s in (0.0, 1.0, 2.0):
        time.sleep(wait_s)
        told = [e for e in accounted(str(slurm["job"]), _CLIENT_TIMEOUT_S) if e.is_over]
        if len(told) > restart:
            return told[restart]
    return now


def _time_limit(directory: Path, job: str, end: ScriptEnd) -> Ending | None:
    """The ending after SIGUSR1: the time limit if little time is left, otherwise something else."""
    if end.caught != "USR1":
        return None
    limit = time_limit_s(job, _CLIENT_TIMEOUT_S)
    if limit is None:  # Slurm did not answer: the limit as it was at the start
        limit = limit_s(str(slurm_of(directory).get("time_limit", "")))
    left = 0.0 if limit is None else limit - end.elapsed_s
    if left <= _grace_s(directory) + _LATE_S:
        stage = ", in setup" if end.stage == "setup" else ""
        return Ending("timeout", f"stopped before the job's time limit (SIGUSR1){stage}")
    reason = f"SIGUSR1 with {left:.0f} s left: preemption, or sent by hand"
    return Ending("preempted", reason, interrupted=True)


def _grace_s(directory: Path) -> float:
    noted = slurm_of(directory).get("grace_s")
    return float(noted) if isinstance(noted, int | float) else 60.0


def _failed_setup(directory: Path, end: ScriptEnd, ended: EndedJob | None) -> Ending | None:
    """The ending if a line before srun failed; the job's log says which."""
    if end.stage != "setup":
        return None
    log = slurm_of(directory).get("log")
    state = f"exit {end.exit_code}" + (f", Slurm: {ended.state}" if ended else "")
    found = before_ranks(directory, Path(log), end.stage) if isinstance(log, str) else None
    return found or Ending("failed", f"in setup: a line of launcher.setup failed ({state})")


def _neighbours(directory: Path) -> list[str]:
    """Jobs that were on the same nodes when the attempt began or ended; none on whole nodes."""
    noted = directory / "neighbours.txt"
    if not noted.exists():
        return []
    slurm = slurm_of(directory)
    now = running_on(str(slurm.get("nodes", "")), _CLIENT_TIMEOUT_S)
    others = {*noted.read_text(errors="replace").split(), *now} - {str(slurm["job_id"])}
    return sorted(others)


def main() -> int:
    """The command line for scripts; its exit status becomes that of the job."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.launch.slurm.attempt",
        description="Make the record of an attempt from inside its Slurm job. The scripts of "
        "launcher=slurm call it at their end, also after a failure.",
        epilog="example: python -m benchmarks.launch.slurm.attempt DIR --exit-code 0",
    )
    parser.add_argument("directory", type=Path, help="the attempt's folder in results/runs")
    parser.add_argument("--exit-code", type=int, required=True, help="srun's")
    parser.add_argument("--caught", default="", help="the signal that the script caught")
    parser.add_argument("--stage", default="ranks", help="setup or ranks (%(default)s)")
    elapsed = "seconds since the script began"
    parser.add_argument("--elapsed-s", type=float, default=0.0, help=elapsed)
    parser.add_argument(
        "--requeue", action="store_true", help="put a preempted job back into the queue"
    )
    arguments = parser.parse_args()
    end = ScriptEnd(arguments.exit_code, arguments.caught, arguments.stage, arguments.elapsed_s)
    try:
        record = close(arguments.directory, end)
    except (DamagedError, OSError) as error:
        print(f"error: not recorded: {error}", file=sys.stderr)
        return 1
    print(f"{record.record_id}: {record.status} {record.reason}".rstrip(), flush=True)
    if arguments.requeue and end.caught == "USR1" and record.status == "preempted":
        _requeue(arguments.directory)
    return 0 if record.status == "ok" else 1


def _requeue(directory: Path) -> None:
    """Put a preempted job back into the queue, since a job that ends by itself counts as done."""
    try:
        requeue(str(slurm_of(directory)["job"]))
    except SlurmError as error:
        print(f"not requeued: {error}; the next submission runs it again", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
