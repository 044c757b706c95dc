"""Why an attempt of a Slurm job ended, and its record from inside the job.

``EVIDENCE`` names what can tell it, the best witness first: Slurm's state of the job, a time limit,
the rank that failed first, what the ranks wrote, a signal, and at last the last line of a log. An
array's script calls ``main`` at its end; if it could not, ``submissions.close_ended`` asks
``reason`` later.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from benchmarks.launch.attempt import (
    HINTS,
    DamagedError,
    Ending,
    ending_by_events,
    exited,
    failed,
    finish_attempt,
    frozen,
    is_complete,
    last_words,
    read_object,
    read_ranks,
)
from benchmarks.launch.slurm.client import (
    EndedJob,
    SlurmError,
    accounted,
    last_state,
    requeue,
    running_on,
    time_limit_s,
)
from benchmarks.records.events import Events
from benchmarks.records.record import RunRecord, Status

_CLIENT_TIMEOUT_S = 5.0  # KillWait, 30 s by default, is all that a preempted job has
_LATE_S = 120.0  # USR1 may come a minute early, and ranks need some time to exit
_TIMED_OUT = (124, 137)  # exit codes of timeout(1), the second if it had to kill
_MEMORY = re.compile(r"slurmstepd\S*: error: (.*(?:exceeded memory limit|oom.kill).*)", re.I)
_TASK = re.compile(r"error: \S+: tasks? (\d+)[\d,-]*: (?!Terminated)(.+)")
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
_BACK_IN_THE_QUEUE = {"PENDING", "REQUEUE_HOLD", "SPECIAL_EXIT", "CONFIGURING"}


@dataclass(frozen=True)
class ScriptEnd:
    """How the script ended, by its own account."""

    exit_code: int  # srun's, or that of the line that failed before it
    caught: str = ""  # USR1, TERM, or nothing
    stage: str = "ranks"  # start, setup (with the line) or ranks: what it did when it ended
    elapsed_s: float = 0.0  # since the script began


@dataclass(frozen=True)
class Evidence:
    """What is known of the end of an attempt. ``ended`` is what Slurm says of its job, ``log`` the
    job's; ``end`` is None if the script could not write the record itself."""

    attempt: Path
    ended: EndedJob | None
    log: Path
    end: ScriptEnd | None

    @cached_property
    def num_ranks(self) -> int:
        """The number of ranks; raises DamagedError."""
        return int(frozen(self.attempt)[0]["num_gpus"])

    @cached_property
    def ranks(self) -> dict[int, Events]:
        """The events of every rank that wrote any."""
        return read_ranks(self.attempt)

    @cached_property
    def by_events(self) -> Ending | None:
        """The ending that the ranks wrote; None if they did not."""
        return ending_by_events(self.num_ranks, self.ranks)

    @cached_property
    def srun(self) -> str:
        """What srun has said."""
        return _text(self.attempt / "srun.log")

    @property
    def where(self) -> str:
        """Words for a reason: where the script was, if not at its ranks."""
        return f", in {self.end.stage}" if self.end and self.end.stage != "ranks" else ""


def of_state(known: Evidence) -> Ending | None:
    """By the memory limit, as the step's daemon says it, or by Slurm's state of the job."""
    if is_complete(known.num_ranks, known.ranks):  # it does not matter what happened later
        return known.by_events
    if match := _MEMORY.search(known.srun):
        return Ending("oom", f"Slurm: {match[1]}")
    ending = ending_by_state(known.ended) if known.ended else None
    return ending and replace(ending, reason=ending.reason + known.where)


def of_time(known: Evidence) -> Ending | None:
    """By ``measure.timeout_s``, or after SIGUSR1 by the job's time limit; with much time left the
    signal has another cause."""
    end, slurm = known.end, slurm_of(known.attempt)
    asked = slurm.get("timeout_s", 0)
    if end is None:
        return None
    if end.exit_code in _TIMED_OUT and not end.caught and 0 < asked <= end.elapsed_s:
        return Ending("timeout", f"not finished after measure.timeout_s={asked}")
    if end.caught != "USR1":
        return None
    limit = time_limit_s(str(slurm.get("job", "")), _CLIENT_TIMEOUT_S)
    if limit is None:  # the job does not requeue itself; the next submission runs the point again
        words = "SIGUSR1: its time limit or preemption, Slurm did not say which"
        return Ending("timeout", words + known.where, interrupted=True)
    left = limit - end.elapsed_s
    if left <= slurm.get("grace_s", 60) + _LATE_S:
        return Ending("timeout", f"stopped before the job's time limit (SIGUSR1){known.where}")
    words = f"SIGUSR1 with {left:.0f} s left: preemption, or sent by hand"
    return Ending("preempted", words, interrupted=True)


def of_first_rank(known: Evidence) -> Ending | None:
    """By the rank that failed first, as srun says it: how it ended, or, if it ended by itself
    without a word, the last line of its log or its exit code. After a signal to the script, srun
    itself has ended the ranks."""
    match, end, ended = _TASK.search(known.srun), known.end, known.ended
    if match is None or (end.caught if end else ended and killed_script(ended)):
        return None
    rank, how = int(match[1]), match[2]
    if code := re.match(r"Exited with exit code (\d+)", how):
        events = known.ranks.get(rank)
        line = "" if events else last_words(known.attempt / f"rank_{rank:03d}.log")
        return failed(f"rank {rank}: {line}") if line else exited(rank, int(code[1]), events)
    hint = HINTS[9] if how.startswith("Killed") else ""
    return Ending("failed", f"rank {rank}: {how} (srun){hint}", interrupted=True)


def of_events(known: Evidence) -> Ending | None:
    """By an error that a rank wrote, which no signal caused."""
    return known.by_events if known.by_events and not known.by_events.interrupted else None


def of_signal(known: Evidence) -> Ending | None:
    """By a signal to the script or to the ranks for which Slurm has no reason: ``scancel`` with a
    signal, or the site's tools."""
    cause = known.by_events.reason if known.by_events else ""
    if known.end and known.end.caught:
        cause = f"the script was sent SIG{known.end.caught}"
    elif known.ended and not known.end and (by_script := killed_script(known.ended)):
        return by_script
    elif " left on SIG" not in cause:
        return known.by_events
    state = f"Slurm: {known.ended.state}" if known.ended else "Slurm does not know the job"
    return Ending("failed", f"{cause}, sent by hand or by a tool of the site ({state})", True)


def of_log(known: Evidence) -> Ending | None:
    """By the last line of srun's or of the job's log where no rank wrote anything, or else by the
    exit code."""
    end, code = known.end, known.end.exit_code if known.end else None
    if any(known.ranks.values()):
        return None
    if known.ended and end is None and known.ended.word in ("COMPLETED", "FAILED"):
        code = known.ended.code  # of a script that ended by itself
    where = (
        f"in {end.stage}" if end and end.stage.startswith("setup") else "before the ranks started"
    )
    logs = (known.attempt / "srun.log", known.log) if code != 0 else ()
    if line := next(filter(None, map(last_words, logs)), ""):
        ending = failed(f"{where}: {line}")
        # 128 + a signal: a command that was killed, as when the controller forgot the job
        was_killed = end is not None and end.exit_code > 128 and end.stage != "ranks"
        return replace(ending, interrupted=ending.interrupted or was_killed)
    # The script itself ends with 1 where it cannot write the record, as on a full disk.
    if end is None and code in (None, 1):
        return None
    return failed(f"{where}: ended with exit code {code}")


EVIDENCE: tuple[Callable[[Evidence], Ending | None], ...] = (
    *(of_state, of_time, of_first_rank, of_events, of_signal, of_log),
)


def reason(
    attempt: Path, ended: EndedJob | None, log: Path, end: ScriptEnd | None = None
) -> Ending | None:
    """How an attempt ended, and why, by the fields of an ``Evidence``; None if nothing says it.
    Raises DamagedError."""
    known = Evidence(attempt, ended, log, end)
    return next(filter(None, (of(known) for of in EVIDENCE)), None)


def slurm_of(attempt: Path) -> dict[str, Any]:
    """What the script wrote about its job when the attempt began; empty if that is damaged."""
    try:
        return read_object(attempt / "slurm.json")
    except DamagedError:
        return {}


def ending_by_state(ended: EndedJob) -> Ending | None:
    """The ending that a Slurm state means for an attempt; None if it explains nothing."""
    if ended.word in _STATES:
        status, interrupted = _STATES[ended.word]
        details = f"exit code {ended.exit_code}, nodes {ended.nodes}"
        return Ending(status, f"Slurm: {ended.state} ({details})", interrupted)
    if ended.preempted:
        return Ending("preempted", f"Slurm: preempted on {ended.nodes}", interrupted=True)
    if ended.word in _BACK_IN_THE_QUEUE:
        words = f"Slurm: {ended.state}, back in the queue without a reason, nodes {ended.nodes}"
        return Ending("lost", words, interrupted=True)
    return None


def killed_script(ended: EndedJob) -> Ending | None:
    """The ending of a job whose batch script was killed, or could not be started."""
    if ended.exit_code == "0:53":
        return Ending("failed", "Slurm: the job's output folder cannot be opened (0:53)", True)
    if ended.reason == "BadConstraints":
        return Ending(
            "failed",
            "Slurm: BadConstraints: no node has what the job asks for: launcher.gpu_type, "
            "cluster.gpus_per_node, sbatch",
            interrupted=True,
        )
    words = f"the batch script was killed by signal {ended.signal} (Slurm: {ended.state})"
    return Ending("failed", words, interrupted=True) if ended.signal else None


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace", encoding="utf-8")
    except OSError:
        return ""


def close(attempt: Path, end: ScriptEnd) -> RunRecord:
    """Write, inside the job, the record of an attempt whose script ends."""
    slurm = slurm_of(attempt)
    ended = _state_now(slurm)
    ending = reason(attempt, ended, Path(str(slurm.get("log", "/nonexistent"))), end)
    slurm |= {"exit_code": end.exit_code, "caught": end.caught}
    noted = attempt / "neighbours.txt"  # written where nodes may be shared
    if noted.exists():
        beside = running_on(str(slurm.get("nodes", "")), _CLIENT_TIMEOUT_S)
        others = {*_text(noted).split(), *beside} - {str(slurm.get("job_id"))}
        slurm["neighbours"] = sorted(others)
    return finish_attempt(attempt, ending, slurm=slurm)


def _state_now(slurm: dict[str, Any]) -> EndedJob | None:
    """What Slurm says of the job now. While a job leaves its nodes, and when it is back in the
    queue, slurmctld does not say why; accounting does, a moment later."""
    job, restart = str(slurm.get("job", "")), slurm.get("restart")
    now = last_state(job, _CLIENT_TIMEOUT_S) if job else None
    unclear = {"COMPLETING"} | _BACK_IN_THE_QUEUE
    if now is None or now.word not in unclear or now.preempted or not isinstance(restart, int):
        return now
    for wait_s in (0.0, 1.0, 2.0):
        time.sleep(wait_s)
        known = accounted([job], _CLIENT_TIMEOUT_S).get(job, [])
        over = [ended for ended in known if ended.is_over]
        if len(over) > restart:
            return over[restart]
    return now


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
    parser.add_argument("--stage", default="ranks", help="where it ended (%(default)s)")
    parser.add_argument(
        "--elapsed-s", type=float, default=0.0, help="seconds since the script began"
    )
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
        try:  # a job that ends by itself counts as done
            requeue(str(slurm_of(arguments.directory).get("job", "")))
        except SlurmError as error:
            print(f"not requeued: {error}; the next submission runs it again", file=sys.stderr)
    return 0 if record.status == "ok" else 1


if __name__ == "__main__":
    sys.exit(main())
