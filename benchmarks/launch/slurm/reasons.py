"""Why an attempt ended, if its ranks' events do not say it: by Slurm's state, logs, exit codes.

The functions read the attempt's folder and Slurm's answers that they are given; they do not call
Slurm. They return None if they have no reason; then the events of the ranks decide.
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
# Errors of a file system or node that may not happen again, so that the point is run again.
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
_LOG_BYTES = 20_000  # bytes at the end of a log that are read

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
    """What the script wrote about its job when the attempt began; if that is damaged, what the
    folder's name says."""
    named = ATTEMPT.fullmatch(directory.name)
    job, restart = (named["job"], int(named["restart"])) if named else ("", 0)
    told: dict[str, Any] = {"job": job, "job_id": job, "restart": restart}
    try:
        return told | read_object(directory / "slurm.json")
    except DamagedError:
        return told


def is_complete(directory: Path) -> bool:
    """Whether every rank measured everything; then it does not matter what happened later."""
    try:
        number = int(read_frozen_spec(directory)["num_gpus"])
    except DamagedError:
        return False
    done = [any(e["event"] == "done" for e in events) for events in read_ranks(directory).values()]
    return sum(done) == number


def ending_by_state(ended: EndedJob) -> Ending | None:
    """The ending that a Slurm state means for an attempt; None if it explains nothing."""
    if ended.preempted and ended.word not in _STATES:
        return Ending("preempted", f"Slurm: preempted on {ended.nodes}", interrupted=True)
    if ended.word not in _STATES:
        return None
    status, interrupted = _STATES[ended.word]
    details = f"exit code {ended.exit_code}, nodes {ended.nodes}"
    return Ending(status, f"Slurm: {ended.state} ({details})", interrupted)


def memory_kill(directory: Path) -> Ending | None:
    """The ending by slurmstepd's line about a kill by the memory limit, if there is one."""
    found = _MEMORY_KILL.search(_tail(directory / "srun.log"))
    return Ending("oom", f"Slurm: {found[1]}") if found else None


def first_kill(directory: Path) -> Ending | None:
    """The ending by the rank that ended first, if a signal killed it; others ended because of
    it."""
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
    """The ending by srun's line on ranks that were killed together with the shell that would have
    written it."""
    found = _TASK_KILL.search(_tail(directory / "srun.log"))
    if found is None:
        return None
    if found[1].isdigit():
        return killed(int(found[1]), _SIGNALS[found[2]])
    reason = f"ranks {found[1]} were killed by signal {_SIGNALS[found[2]]}"
    return Ending("failed", reason, interrupted=True)


def before_ranks(directory: Path, log: Path | None, stage: str = "") -> Ending | None:
    """The ending of an attempt in which no rank wrote anything: the last line that gives a reason,
    from srun's errors, a rank's output, or the job's log. None if ranks wrote, or if there is no
    such line.

    If a line of the setup failed, the shell or that command says why. Slurm's step daemon writes to
    the same log at any time, for example when a process ends while it reads how much memory that
    process uses, so its lines count only if they name a fault of the node, or if there are no
    others.
    """
    if any(read_ranks(directory).values()):
        return None
    in_setup = stage == "setup"
    ranks = sorted(directory.glob("rank_*.log"))
    for path in (*ranks[:1], directory / "srun.log", *([log] if log else [])):
        if line := (_cause(path, of_setup=True) if in_setup else "") or _cause(path):
            where = "in setup" if in_setup else "before the ranks started"
            return Ending("failed", f"{where}: {line}", bool(_PASSING.search(line)))
    return None


def killed_script(ended: EndedJob) -> Ending | None:
    """The ending of an attempt whose batch script was killed, so that it wrote no record."""
    if not ended.signal:
        return None
    reason = f"the batch script was killed by signal {ended.signal} (Slurm: {ended.state})"
    return Ending("failed", reason, interrupted=True)


def left_on_signal(directory: Path, ended: EndedJob | None, caught: str) -> Ending | None:
    """The ending if ranks or the script got a signal for which Slurm has no reason: scancel with a
    signal, or the site's tools."""
    ranks = read_ranks(directory)
    told = ending_by_events(len(ranks), ranks) if ranks else None
    by_signal = told is not None and " left on SIG" in told.reason
    if not caught and not by_signal:
        return None
    if told is not None and told.status != "ok" and not told.interrupted:
        return None  # another error came first
    who = told.reason if told is not None and by_signal else f"the script was sent SIG{caught}"
    state = f"Slurm: {ended.state}" if ended else "Slurm does not answer"
    return Ending("failed", f"{who}, sent by hand or by a tool of the site ({state})", True)


def _cause(path: Path, of_setup: bool = False) -> str:
    """The last line of a log that may be a cause; lines that only say that it ended are skipped,
    and for a line of the setup also what the step daemon says of its own work."""
    lines = [line.strip() for line in _tail(path).splitlines()]
    causes = [line for line in lines if not _NO_CAUSE.search(line)]
    if of_setup:
        causes = [c for c in causes if not c.startswith("slurmstepd") or _PASSING.search(c)]
    return causes[-1][:300] if causes else ""


def _tail(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _LOG_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def with_state(slurm: Mapping[str, Any], ended: EndedJob | None) -> dict[str, Any]:
    """The part of the job's data that a record keeps, with Slurm's last state."""
    return dict(slurm) | {"state": ended.state if ended else ""}
