"""Close an attempt from inside its job: the last line of an array's script.

The ranks' event files say what was measured. Where they cannot say why it stopped, Slurm does:
the signal that the script caught, what slurmstepd wrote about memory, the exit code of the rank
that ended first.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

from benchmarks.launch.finish import Ending, finish_attempt, killed
from benchmarks.launch.slurm.client import EndedJob, last_ending
from benchmarks.records.rank_events import rank_file, read_events
from benchmarks.records.record import RunRecord, Status

_CLIENT_TIMEOUT_S = 5.0  # KillWait, 30 s by default, is all that a preempted job has
_MEMORY_KILL = re.compile(r"slurmstepd\S*: error: (.*(?:exceeded memory limit|oom.kill).*)", re.I)

_STATES: dict[str, tuple[Status, bool]] = {  # Slurm's state: status, ended from outside
    "OUT_OF_MEMORY": ("oom", False),
    "TIMEOUT": ("timeout", False),
    "DEADLINE": ("timeout", False),
    "PREEMPTED": ("preempted", True),
    "REQUEUED": ("preempted", True),
    "CANCELLED": ("failed", True),
    "NODE_FAIL": ("lost", True),
    "BOOT_FAIL": ("lost", True),
}


def slurm_of(directory: Path) -> dict[str, object]:
    """What the script noted of its job when the attempt began."""
    facts: dict[str, object] = json.loads((directory / "slurm.json").read_text())
    return facts


def is_complete(directory: Path) -> bool:
    """Whether every rank measured everything; then it does not matter what came after."""
    spec = json.loads((directory / "spec.json").read_text())
    events = (read_events(rank_file(directory, rank)) for rank in range(spec["num_gpus"]))
    return all(any(event["event"] == "done" for event in rank) for rank in events)


def ending_by_state(ended: EndedJob) -> Ending | None:
    """What a Slurm state means for an attempt; None where it explains nothing."""
    word = ended.state.split()[0] if ended.state else ""  # "CANCELLED by 1000"
    if word not in _STATES:
        return None
    status, interrupted = _STATES[word]
    details = f"exit code {ended.exit_code}, nodes {ended.nodes}"
    return Ending(status, f"Slurm: {ended.state} ({details})", interrupted)


def memory_kill(directory: Path) -> Ending | None:
    """slurmstepd's own line about a kill by the memory limit, if it wrote one."""
    log = directory / "srun.log"
    found = _MEMORY_KILL.search(log.read_text(errors="replace")) if log.exists() else None
    return Ending("oom", f"Slurm: {found[1]}") if found else None


def close(directory: Path, exit_code: int, caught: str) -> RunRecord:
    """Write the record of an attempt whose srun has ended."""
    ending = None if is_complete(directory) else _ending(directory, caught)
    slurm = slurm_of(directory) | {"exit_code": exit_code, "caught": caught}
    return finish_attempt(directory, ending=ending, slurm=slurm)


def _ending(directory: Path, caught: str) -> Ending | None:
    if caught == "USR1":
        return Ending("timeout", "stopped before the job's time limit (SIGUSR1)")
    ended = last_ending(str(slurm_of(directory)["job_id"]), _CLIENT_TIMEOUT_S)
    explained = memory_kill(directory) or (ending_by_state(ended) if ended else None)
    if explained is None and caught == "TERM":
        return Ending("preempted", "Slurm sent SIGTERM", interrupted=True)
    return explained or _first_kill(directory)


def _first_kill(directory: Path) -> Ending | None:
    """The rank that ended first, if a signal ended it: the others only followed."""
    codes = [
        (path.stat().st_mtime, int(path.stem.removeprefix("rank_")), int(path.read_text()))
        for path in directory.glob("rank_*.exit")
    ]
    bad = min((code for code in codes if code[2]), default=None)
    return killed(bad[1], bad[2] - 128) if bad and bad[2] > 128 else None


def main() -> int:
    """Command line for the script; the exit status becomes the job's."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.launch.slurm.attempt",
        description="Record an attempt from inside its Slurm job: what its ranks wrote, and why it "
        "ended where they cannot say. The last line of the scripts of launcher=slurm.",
        epilog="example: python -m benchmarks.launch.slurm.attempt DIR --exit-code 0",
    )
    parser.add_argument("directory", type=Path, help="the attempt's, below results/runs")
    parser.add_argument("--exit-code", type=int, required=True, help="srun's")
    parser.add_argument("--caught", default="", help="the signal that the script caught")
    arguments = parser.parse_args()
    record = close(arguments.directory, arguments.exit_code, arguments.caught)
    print(f"{record.record_id}: {record.status} {record.reason}".rstrip())
    return 0 if record.status == "ok" else 1


if __name__ == "__main__":
    sys.exit(main())
