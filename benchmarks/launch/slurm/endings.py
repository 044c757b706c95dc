"""Why an attempt of a Slurm job ended, and its record from inside the job.

The event files of the ranks say what was measured, and usually why it stopped. Otherwise the reason
is, in this order: the memory limit, by the line of Slurm's step daemon; Slurm's state of the job;
the signal that the script caught; the rank that failed first, by srun, with the last line of its
log or its exit code; the last line of srun's or the job's log. An array's script calls ``main`` at
its end; if it could not, ``submissions.close_ended`` asks ``reason`` later.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from dataclasses import dataclass, replace
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
from benchmarks.launch.options import seconds_of
from benchmarks.launch.slurm.client import (
    EndedJob,
    SlurmError,
    accounted,
    last_state,
    requeue,
    running_on,
    time_limit_s,
)
from benchmarks.records.record import RunRecord, Status

_CLIENT_TIMEOUT_S = 5.0  # KillWait, 30 s by default, is all that a preempted job has
_LATE_S = 120.0  # USR1 may come a minute early, and ranks need some time to exit
_TIMED_OUT = (124, 137)  # exit codes of timeout(1), the second if it had to kill
_MEMORY = re.compile(r"slurmstepd\S*: error: (.*(?:exceeded memory limit|oom.kill).*)", re.I)
_FORGOTTEN = re.compile(r"(expired or )?invalid job\b", re.I)  # srun's, of a controller begun anew
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


def slurm_of(attempt: Path) -> dict[str, Any]:
    """What the script wrote about its job when the attempt began; empty if that is damaged."""
    try:
        return read_object(attempt / "slurm.json")
    except DamagedError:
        return {}


def reason(
    attempt: Path, ended: EndedJob | None, log: Path, end: ScriptEnd | None = None
) -> Ending | None:
    """How an attempt ended, and why; None if nothing says it.

    ``ended`` is what Slurm says of its job, ``log`` the job's; ``end`` is None if the script could
    not write the record itself. Raises DamagedError.
    """
    number, ranks = int(frozen(attempt)[0]["num_gpus"]), read_ranks(attempt)
    if is_complete(number, ranks):
        return ending_by_events(number, ranks)
    if match := _MEMORY.search(_text(attempt / "srun.log")):
        return Ending("oom", f"Slurm: {match[1]}")
    where = f", in {end.stage}" if end and end.stage != "ranks" else ""
    if by_state := ended and ending_by_state(ended):
        if by_state.status == "timeout" and not ranks and not where and (line := last_words(log)):
            where = f", before the ranks started: {line}"
        return replace(by_state, reason=by_state.reason + where)
    if end and (by_clock := _time_limit(attempt, end, where)):
        return by_clock
    by_script = killed_script(ended) if ended and end is None else None
    first = None if by_script or (end and end.caught) else _first_failure(attempt)
    if first:  # errors of the other ranks are its consequences
        return first
    by_events = ending_by_events(number, ranks)
    if by_events and not by_events.interrupted:
        return by_events
    if end and end.caught:
        return _by_hand(f"the script was sent SIG{end.caught}", ended)
    if by_script:
        return by_script
    if by_events and " left on SIG" in by_events.reason:
        return _by_hand(by_events.reason, ended)
    if any(ranks.values()):
        return by_events
    return _before_the_ranks(attempt, log, ended, end)


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
        words = (
            "no node has what the job asks for: launcher.gpu_type, cluster.gpus_per_node, sbatch"
        )
        return Ending("failed", f"Slurm: BadConstraints: {words}", interrupted=True)
    words = f"the batch script was killed by signal {ended.signal} (Slurm: {ended.state})"
    return Ending("failed", words, interrupted=True) if ended.signal else None


def _by_hand(cause: str, ended: EndedJob | None) -> Ending:
    """A signal for which Slurm has no reason: scancel with a signal, or the site's tools."""
    state = f"Slurm: {ended.state}" if ended else "Slurm does not know the job"
    return Ending("failed", f"{cause}, sent by hand or by a tool of the site ({state})", True)


def _time_limit(attempt: Path, end: ScriptEnd, where: str) -> Ending | None:
    """The ending by ``measure.timeout_s``, or after SIGUSR1: the job's time limit if little time is
    left, otherwise something else. None if it was neither."""
    slurm = slurm_of(attempt)
    asked = slurm.get("timeout_s", 0)
    if end.exit_code in _TIMED_OUT and not end.caught and 0 < asked <= end.elapsed_s:
        return Ending("timeout", f"not finished after measure.timeout_s={asked}")
    if end.caught != "USR1":
        return None
    limit = time_limit_s(str(slurm.get("job", "")), _CLIENT_TIMEOUT_S)
    if limit is None:  # Slurm did not answer: the limit as it was at the start
        limit = seconds_of(str(slurm.get("time_limit", "")))
    left = 0.0 if limit is None else limit - end.elapsed_s
    if left <= slurm.get("grace_s", 60) + _LATE_S:
        return Ending("timeout", f"stopped before the job's time limit (SIGUSR1){where}")
    words = f"SIGUSR1 with {left:.0f} s left: preemption, or sent by hand"
    return Ending("preempted", words, interrupted=True)


def _first_failure(attempt: Path) -> Ending | None:
    """The ending by the rank that srun says failed first: how it ended, or, if it ended by itself
    without a word, the last line of its log or its exit code. None if its own event says it."""
    match = _TASK.search(_text(attempt / "srun.log"))
    if match is None:
        return None
    rank, how = int(match[1]), match[2]
    if code := re.match(r"Exited with exit code (\d+)", how):
        events = read_ranks(attempt).get(rank)
        line = "" if events else last_words(attempt / f"rank_{rank:03d}.log")
        return failed(f"rank {rank}: {line}") if line else exited(rank, int(code[1]), events)
    hint = HINTS[9] if how.startswith("Killed") else ""
    return Ending("failed", f"rank {rank}: {how} (srun){hint}", interrupted=True)


def _before_the_ranks(
    attempt: Path, log: Path, ended: EndedJob | None, end: ScriptEnd | None
) -> Ending | None:
    """The ending of an attempt in which no rank wrote anything: the last line of srun's or the
    job's log that may be a cause, but not after a success; otherwise the exit code. Slurm's step
    daemon writes to the job's log at any time, so its lines count only if there are no others, or
    if they name a fault of the node."""
    code = end.exit_code if end else None
    if ended and not end and ended.word in ("COMPLETED", "FAILED"):  # it ended by itself
        number = ended.exit_code.partition(":")[0]
        code = int(number) if number.isdigit() else None
    in_setup = end is not None and end.stage.startswith("setup")
    where = f"in {end.stage}" if end and in_setup else "before the ranks started"
    for path in (attempt / "srun.log", log) if code != 0 else ():
        line = last_words(path, lambda x: not x.startswith("slurmstepd") or failed(x).interrupted)
        if line := line or last_words(path):
            ending = failed(f"{where}: {line}")
            if _FORGOTTEN.search(line):
                return replace(ending, status="lost", interrupted=True)
            # 128 + a signal: a command that was killed, as when the controller forgot the job
            was_killed = end is not None and end.exit_code > 128 and end.stage != "ranks"
            return replace(ending, interrupted=ending.interrupted or was_killed)
    if end and in_setup:
        return failed(f"{where}: exit {end.exit_code}")
    if end and code == 0:
        return failed("the ranks wrote nothing, and ended with exit code 0")
    # The script itself ends with 1 where it cannot write the record, as on a full disk.
    if end is None and code not in (None, 1):  # another program, by an exec in launcher.setup
        return failed(f"the script ended with exit code {code}, before its ranks")
    return None


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
        try:  # a job that ends by itself counts as done
            requeue(str(slurm_of(arguments.directory).get("job", "")))
        except SlurmError as error:
            print(f"not requeued: {error}; the next submission runs it again", file=sys.stderr)
    return 0 if record.status == "ok" else 1


if __name__ == "__main__":
    sys.exit(main())
