"""Why an attempt ended, where its ranks' events cannot say: Slurm's word, its log, exit codes.

Fed by an attempt's folder and by what Slurm says of its job; asks nobody by itself. A ``None``
leaves the word to the ranks' events.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.launch.finish import Ending, ending_by_events, killed, read_ranks
from benchmarks.launch.frozen import DamagedError, read_frozen_spec, read_object
from benchmarks.launch.slurm.client import EndedJob
from benchmarks.records.record import Status

ATTEMPT = re.compile(r"slurm-(?P<job>.+)-(?P<restart>\d+)")
_MEMORY_KILL = re.compile(r"slurmstepd\S*: error: (.*(?:exceeded memory limit|oom.kill).*)", re.I)
# Troubles of a file system or a node that are gone the next day: such a point is run again.
_PASSING = re.compile(
    r"no space left|quota exceeded|read-only file system|stale file handle|input/output error|"
    r"node failure|communication connection failure",
    re.I,
)
_NO_CAUSE = re.compile(
    r"^\s*$|lacks support for cpu binding|"
    r"force terminated|terminated$|job step aborted|STEP .* ON .* CANCELLED|"
    r"JOB .* ON .* CANCELLED|^slurm\S+: error: \*\*\*|task \d+.*: exited",
    re.I,
)
_SIGNALS = {  # as srun names the end of a task
    "Killed": 9,
    "Segmentation fault": 11,
    "Aborted": 6,
    "Bus error": 7,
    "Illegal instruction": 4,
    "Floating point exception": 8,
}
_TASK_KILL = re.compile(rf"error: \S+: tasks? ([\d,-]+): ({'|'.join(_SIGNALS)})")
_LOG_BYTES = 20_000  # of a log's end

_STATES: dict[str, tuple[Status, bool]] = {  # Slurm's state: status, ended from outside
    "OUT_OF_MEMORY": ("oom", False),
    "TIMEOUT": ("timeout", False),
    "DEADLINE": ("timeout", False),
    "PREEMPTED": ("preempted", True),
    "REQUEUED": ("preempted", True),
    "PENDING": ("preempted", True),  # asked from inside: the job is back in the queue already
    "REQUEUE_HOLD": ("preempted", True),
    "CANCELLED": ("failed", True),
    "NODE_FAIL": ("lost", True),
    "BOOT_FAIL": ("lost", True),
}


def slurm_of(directory: Path) -> dict[str, Any]:
    """What the script noted of its job when the attempt began; where that is damaged, what the
    folder's name tells."""
    named = ATTEMPT.fullmatch(directory.name)
    job, restart = (named["job"], int(named["restart"])) if named else ("", 0)
    told: dict[str, Any] = {"job": job, "job_id": job, "restart": restart}
    try:
        return told | read_object(directory / "slurm.json")
    except DamagedError:
        return told


def is_complete(directory: Path) -> bool:
    """Whether every rank measured everything; then it does not matter what came after."""
    try:
        number = int(read_frozen_spec(directory)["num_gpus"])
    except DamagedError:
        return False
    done = [any(e["event"] == "done" for e in events) for events in read_ranks(directory).values()]
    return sum(done) == number


def ending_by_state(ended: EndedJob) -> Ending | None:
    """What a Slurm state means for an attempt; None where it explains nothing."""
    if ended.preempted and ended.word not in _STATES:
        return Ending("preempted", f"Slurm: preempted on {ended.nodes}", interrupted=True)
    if ended.word not in _STATES:
        return None
    status, interrupted = _STATES[ended.word]
    details = f"exit code {ended.exit_code}, nodes {ended.nodes}"
    return Ending(status, f"Slurm: {ended.state} ({details})", interrupted)


def memory_kill(directory: Path) -> Ending | None:
    """slurmstepd's own line about a kill by the memory limit, if it wrote one."""
    found = _MEMORY_KILL.search(_tail(directory / "srun.log"))
    return Ending("oom", f"Slurm: {found[1]}") if found else None


def first_kill(directory: Path) -> Ending | None:
    """The rank that ended first, if a signal ended it: the others only followed."""
    codes = []
    for path in directory.glob("rank_*.exit"):
        try:
            number = int(path.stem.removeprefix("rank_"))
            codes.append((path.stat().st_mtime, number, int(path.read_text())))
        except (OSError, ValueError):
            continue
    bad = min((code for code in codes if code[2]), default=None)
    return killed(bad[1], bad[2] - 128) if bad and bad[2] > 128 else None


def killed_with_its_shell(directory: Path) -> Ending | None:
    """A rank that was killed together with the shell that would have noted it; srun tells.

    Where the script was signalled that tells nothing: srun then kills the ranks itself.
    """
    found = _TASK_KILL.search(_tail(directory / "srun.log"))
    if found is None:
        return None
    if found[1].isdigit():
        return killed(int(found[1]), _SIGNALS[found[2]])
    reason = f"ranks {found[1]} were killed by signal {_SIGNALS[found[2]]}"
    return Ending("failed", reason, interrupted=True)


def before_ranks(directory: Path, log: Path | None, stage: str = "") -> Ending | None:
    """The end of an attempt in which no rank wrote anything: the last line that says why, from
    srun's errors, a rank's own output, or the job's log. None where ranks wrote, or nobody says.
    """
    if any(read_ranks(directory).values()):
        return None
    ranks = sorted(directory.glob("rank_*.log"))
    for path in (*ranks[:1], directory / "srun.log", *([log] if log else [])):
        if line := _cause(path):
            where = "in setup" if stage == "setup" else "before the ranks started"
            return Ending("failed", f"{where}: {line}", bool(_PASSING.search(line)))
    return None


def killed_script(ended: EndedJob) -> Ending | None:
    """The end of an attempt whose batch script was killed, so that it recorded nothing."""
    if not ended.signal:
        return None
    reason = f"the batch script was killed by signal {ended.signal} (Slurm: {ended.state})"
    return Ending("failed", reason, interrupted=True)


def left_on_signal(directory: Path, ended: EndedJob | None, caught: str) -> Ending | None:
    """Ranks or the script were sent a signal, and Slurm knows of no reason: somebody's scancel
    with a signal, or the site's own tools."""
    ranks = read_ranks(directory)
    told = ending_by_events(len(ranks), ranks) if ranks else None
    by_signal = told is not None and " left on SIG" in told.reason
    if not caught and not by_signal:
        return None
    if told is not None and told.status != "ok" and not told.interrupted:
        return None  # an error of its own came first
    who = told.reason if told is not None and by_signal else f"the script was sent SIG{caught}"
    state = f"Slurm: {ended.state}" if ended else "Slurm does not answer"
    return Ending("failed", f"{who}, sent by hand or by a tool of the site ({state})", True)


def _cause(path: Path) -> str:
    """The last line of a log that may be a cause, without those that only say that it ended."""
    lines = [line.strip() for line in _tail(path).splitlines()]
    causes = [line for line in lines if not _NO_CAUSE.search(line)]
    return causes[-1][:300] if causes else ""


def _tail(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _LOG_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def with_state(slurm: Mapping[str, Any], ended: EndedJob | None) -> dict[str, Any]:
    """What a record keeps of the job, with Slurm's last word."""
    return dict(slurm) | {"state": ended.state if ended else ""}
