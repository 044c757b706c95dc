"""Makes the record of an attempt from inside its job; an array's script calls it at its end.

The event files of the ranks say what was measured. If they do not say why the attempt stopped,
Slurm is asked, because a signal alone may mean the time limit, preemption or somebody's scancel.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.launch.finish import Ending, ending_by_events, finish_attempt, killed, read_ranks
from benchmarks.launch.frozen import DamagedError, read_frozen_spec, read_object
from benchmarks.launch.slurm.client import (
    EndedJob,
    SlurmError,
    accounted,
    last_ending,
    limit_s,
    requeue,
    running_on,
    time_limit_s,
)
from benchmarks.records.record import RunRecord, Status

# Why an attempt ended, if its ranks' events do not say it: by Slurm's state, logs, exit codes.
#
# The functions read the attempt's folder and Slurm's answers that they are given; they do not call
# Slurm. They return None if they have no reason; then the events of the ranks decide.


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
        prog="python -m benchmarks.launch.slurm.endings",
        description="Make the record of an attempt from inside its Slurm job. The scripts of "
        "launcher=slurm call it at their end, also after a failure.",
        epilog="example: python -m benchmarks.launch.slurm.endings DIR --exit-code 0",
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
