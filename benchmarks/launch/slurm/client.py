"""Slurm's own commands, each with a time limit and one line of error.

Assumes Slurm 21.08 or newer on the PATH. What it says is never the measurement: it explains why
one is missing. Accounting (sacct) is used where the cluster has it; slurmctld's memory is the
fallback, and tells only the last of a requeued job's endings.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

_TIMEOUT_S = 60.0
_NOISE = re.compile(r"^(sbatch|squeue|sacct|scontrol): (error: )?")


class SlurmError(RuntimeError):
    """Slurm refused or did not answer; the message is one line."""


@dataclass(frozen=True)
class QueuedJob:
    """A job, or one task of an array, that slurmctld still has to do with."""

    job: str  # "17", or "17_3" for a task of an array
    key: str  # job name and array index: known before the job has an id
    state: str  # RUNNING, PENDING, ...
    reason: str  # why it waits
    nodes: str
    time_left: str

    @property
    def has_started(self) -> bool:
        """Whether its processes may be alive."""
        return self.state not in {"PENDING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT"}


@dataclass(frozen=True)
class EndedJob:
    """One ending of a job; a requeued one has several."""

    state: str
    exit_code: str  # "code:signal"
    nodes: str


def submit(script: Path, *flags: str) -> str:
    """Submit a script and return the job's id; raises SlurmError."""
    answer = _call("sbatch", "--parsable", *flags, str(script))
    return answer.strip().partition(";")[0]  # "17;cluster" on a federation


def queued_jobs() -> dict[str, QueuedJob]:
    """The user's jobs that wait or run, by key; raises SlurmError."""
    lines = _call("squeue", "--me", "--array", "--noheader", "--format=%i|%j_%K|%T|%r|%N|%L")
    jobs = [QueuedJob(*line.split("|")) for line in lines.splitlines()]
    return {job.key: job for job in jobs}


def endings(job: str) -> list[EndedJob]:
    """How a job ended, a requeued one several times, oldest first; empty where nobody knows."""
    try:
        return _accounted(job)
    except SlurmError:
        last = last_ending(job)
        return [last] if last else []


def last_ending(job: str, timeout_s: float = _TIMEOUT_S) -> EndedJob | None:
    """What slurmctld remembers of a job (for MinJobAge seconds); None where it does not.

    Tasks that were cancelled before any of their array began are known by the array's id alone.
    """
    for known_as in dict.fromkeys((job, job.partition("_")[0])):
        try:
            text = _call("scontrol", "--oneliner", "show", "job", known_as, timeout_s=timeout_s)
        except SlurmError:
            continue
        if len(text.splitlines()) == 1:
            fields = dict(word.split("=", 1) for word in text.split() if "=" in word)
            return EndedJob(fields["JobState"], fields["ExitCode"], fields["NodeList"])
    return None


def _accounted(job: str) -> list[EndedJob]:
    columns = "--format=State,ExitCode,NodeList"
    flags = ("--allocations", "--duplicates", "--noheader", "--parsable2")
    lines = _call("sacct", "--jobs", job, *flags, columns).splitlines()
    if not lines:
        raise SlurmError(f"no accounting of job {job}")
    return [EndedJob(*line.split("|")) for line in lines]


def _call(*command: str, timeout_s: float = _TIMEOUT_S) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except FileNotFoundError:
        raise SlurmError(f"{command[0]}: not found; is this a login node of a cluster?") from None
    except subprocess.TimeoutExpired:
        raise SlurmError(f"{command[0]}: no answer within {timeout_s:g} s") from None
    if done.returncode:
        lines = [_NOISE.sub("", line) for line in done.stderr.splitlines() if line.strip()]
        raise SlurmError(f"{command[0]}: {lines[-1] if lines else f'exit {done.returncode}'}")
    return done.stdout
