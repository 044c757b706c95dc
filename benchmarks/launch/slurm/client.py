"""The questions to Slurm, and its answers as types.

It needs Slurm 21.08 or newer on the PATH. Its answers never change what was measured; they explain
why a measurement is missing. Accounting (sacct) is used if the cluster has it. Otherwise slurmctld
is asked, which remembers only the last ending of a requeued job, for a few minutes.

Commands run without environment variables that would change their meaning (``SQUEUE_STATES``,
``SLURM_CLUSTERS``, those of a surrounding salloc). Variables of sbatch that set a flag which the
script does not set are kept, because they are the site's defaults.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.launch.options import OWNED, seconds_of

TIMEOUT_S = 60.0
_TOLD = 500  # last letters of what a command says of its failure
_NOISE = re.compile(r"^(sbatch|squeue|sacct|scontrol): ((error|fatal): )?")
_KEPT = {"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT"}  # where Slurm is and who asks
_PREFIXES = ("SLURM_", "SBATCH_", "SQUEUE_", "SACCT_", "SALLOC_", "SRUN_")
_ALIASES = {
    "array-inx": "array",
    "timelimit": "time",
    "mem-per-node": "mem",
    "no-requeue": "requeue",
}
_OVER = {
    *("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "REQUEUED"),
    *("OUT_OF_MEMORY", "DEADLINE", "BOOT_FAIL", "REVOKED"),
}
_WAITS = {"PENDING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT"}
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_JOB_ID = re.compile(r"^(\d+)(;\S+)?\s*$", re.M)  # "17;cluster" on a federation
_PRCTL = getattr(ctypes.CDLL(None), "prctl", None)


class SlurmError(RuntimeError):
    """Slurm refused or did not answer; the message is one line."""


class NoAnswerError(SlurmError):
    """A command may have had its effect or not: no answer in time, or none that is understood."""


@dataclass(frozen=True)
class ClusterFacts:
    """What a submission needs to know about the cluster."""

    identity: str = ""  # name@controller; empty if it could not be asked
    max_array_size: int = 1001


@dataclass(frozen=True, kw_only=True)
class QueuedJob:
    """A job, or one task of an array, that is in slurmctld's queue."""

    job: str  # "17", or "17_3" for a task of an array
    state: str  # RUNNING, PENDING, ...
    reason: str = ""  # why it waits
    nodes: str = ""
    time_left: str = ""

    @property
    def has_started(self) -> bool:
        """Whether its processes may be alive."""
        return self.state not in _WAITS


@dataclass(frozen=True)
class EndedJob:
    """One ending of a job; a job that was requeued has several."""

    state: str
    exit_code: str  # "code:signal"
    nodes: str
    preempted: bool = False  # slurmctld has begun to take its nodes
    reason: str = ""  # why it could not begin, which only slurmctld says

    @property
    def word(self) -> str:
        """The first word of the state, such as ``CANCELLED`` of ``CANCELLED by 1000``."""
        return self.state.split()[0] if self.state else ""

    @property
    def is_over(self) -> bool:
        """Whether the job has ended, since accounting also lists jobs that run."""
        return self.word in _OVER

    @property
    def code(self) -> int | None:
        """The exit code of the batch script; None if Slurm does not say."""
        code = self.exit_code.partition(":")[0]
        return int(code) if code.isdigit() else None

    @property
    def signal(self) -> int:
        """The signal that ended the batch script; 0 if none did."""
        number = self.exit_code.partition(":")[2]
        return int(number) if number.isdigit() and int(number) else max(0, (self.code or 0) - 128)


def site_defaults(environment: Mapping[str, str], owned: Collection[str]) -> dict[str, str]:
    """The ``SBATCH_*`` variables for flags that neither the suite nor the script sets."""
    defaults = {}
    for name, value in environment.items():
        flag = name.removeprefix("SBATCH_").lower().replace("_", "-")
        is_decided = {flag, _ALIASES.get(flag, flag)} & (OWNED | set(owned))
        if name.startswith("SBATCH_") and not is_decided:
            defaults[name] = value
    return defaults


def call(*command: str, timeout_s: float = TIMEOUT_S, more: Mapping[str, str] | None = None) -> str:
    """The output of a command, within a time limit; ``more`` is added to its environment. Raises
    SlurmError with one line, which is a NoAnswerError if the command may have had its effect."""
    clean = {k: v for k, v in os.environ.items() if k in _KEPT or not k.startswith(_PREFIXES)}
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
            preexec_fn=end_with_the_launcher,
            env=clean | dict(more or {}),
        )
    except FileNotFoundError:
        raise SlurmError(f"{command[0]}: not found; is this a login node of a cluster?") from None
    except subprocess.TimeoutExpired:
        raise NoAnswerError(f"{command[0]}: no answer within {timeout_s:g} s") from None
    if done.returncode:
        # A site's plugin gives the cause first, and the command's last line only the consequence.
        lines = dict.fromkeys(_NOISE.sub("", line.strip()) for line in done.stderr.splitlines())
        told = "; ".join(line for line in lines if line and not line.startswith('Try "'))
        message = f"{command[0]}: {told[-_TOLD:] or f'exit {done.returncode}'}"
        # These concern the answer only: the controller may have acted.
        lost = re.search(r"timed out|timeout|receive|connection (reset|refused)", message, re.I)
        raise (NoAnswerError if lost else SlurmError)(message)
    return done.stdout


def _said(*command: str, timeout_s: float = TIMEOUT_S) -> str:
    """The output of a command; empty where it fails or does not answer."""
    try:
        return call(*command, timeout_s=timeout_s)
    except SlurmError:
        return ""


def end_with_the_launcher() -> None:
    """On Linux, end with the launcher: an sbatch that goes on after the launcher was killed would
    submit a job while the next launcher already looks for it."""
    if _PRCTL is not None:
        _PRCTL(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def submit(script: Path, owned: Collection[str], *flags: str) -> str:
    """Submit a script and return the job's id. Where sbatch fails, which it also does after it has
    submitted, or prints no number or several, the job is looked for by its name: the script's.

    ``owned`` are flags that the script sets and that no environment variable may change. Raises
    SlurmError; NoAnswerError if it may be submitted.
    """
    kept = site_defaults(os.environ, owned)
    try:
        answer = call("sbatch", "--parsable", *flags, str(script), more=kept)
        numbers = {number for number, _ in _JOB_ID.findall(answer)}
        if len(numbers) == 1:
            return str(numbers.pop())
        raise NoAnswerError(f"sbatch: no job id in its answer {answer.strip()[:80]!r}")
    except SlurmError as error:
        try:
            job = find_job(script.stem)
        except SlurmError:  # whether there is a job is not known
            raise NoAnswerError(str(error)) from None
        if not job:
            raise
        return job


def cluster_facts(timeout_s: float = TIMEOUT_S) -> ClusterFacts:
    """The cluster's identity and its largest array; raises SlurmError."""
    config = call("scontrol", "show", "config", timeout_s=timeout_s)
    pairs = (line.partition("=") for line in config.splitlines())
    settings = {name.strip(): value.strip() for name, _, value in pairs}
    host = settings.get("SlurmctldHost[0]", settings.get("SlurmctldHost", ""))
    size = settings.get("MaxArraySize", "")
    identity = f"{settings.get('ClusterName', '')}@{host}"
    return ClusterFacts(identity, int(size) if size.isdigit() else ClusterFacts.max_array_size)


def absence() -> str:
    """Why nothing can be submitted from this machine at any time; empty if it is part of a
    cluster, also of one that does not answer now."""
    if shutil.which("sbatch") is None:
        return "there is no sbatch here"
    try:
        cluster_facts(timeout_s=2)  # a lack of configuration is said at once
    except SlurmError as error:
        return f"this machine is in no cluster, {error}" * ("config" in str(error))
    return ""


def queued_jobs(users: Iterable[int]) -> dict[str, QueuedJob]:
    """The jobs and tasks of these users that wait or run, by id; raises SlurmError."""
    asked = ",".join(map(str, sorted(set(users))))
    flags = ("--array", "--noheader", "--states=all", f"--user={asked}", "--format=%i|%T|%r|%N|%L")
    rows = [line.split("|") for line in call("squeue", *flags).splitlines()]
    jobs = [
        QueuedJob(job=row[0], state=row[1], reason=row[2], nodes=row[3], time_left=row[4])
        for row in rows
        if len(row) == 5
    ]
    return {job.job: job for job in jobs if job.state not in _OVER or job.state in _WAITS}


def find_job(name: str) -> str:
    """The id of the job with a name, for jobs whose sbatch did not answer; empty if there is none.
    Raises SlurmError if Slurm does not say."""
    lines = call("squeue", "--noheader", "--states=all", f"--name={name}", "--format=%F").split()
    if lines:
        return lines[0]
    # Without accounting, what slurmctld remembers is all that there is.
    flags = ("--allocations", "--noheader", "--parsable2", "--starttime=now-30days")
    lines = _said("sacct", *flags, f"--name={name}", "--format=JobID").split()
    return lines[0].partition("_")[0] if lines else ""


def time_limit_s(job: str, timeout_s: float = TIMEOUT_S) -> float | None:
    """The time limit of a running job in seconds; None if Slurm does not say. The time left is not
    asked for, because squeue computes it from the clock of its own host, which may be wrong."""
    text = _said("squeue", "--noheader", f"--job={job}", "--format=%l", timeout_s=timeout_s)
    return seconds_of(text.strip())


def requeue(job: str) -> None:
    """Put a job back into the queue; raises SlurmError."""
    call("scontrol", "requeue", job)


def running_on(nodes: str, timeout_s: float = TIMEOUT_S) -> list[str]:
    """The jobs that run on these nodes now; none if Slurm does not say."""
    flags = ("--noheader", "--states=RUNNING", f"--nodelist={nodes}", "--format=%A")
    return _said("squeue", *flags, timeout_s=timeout_s).split()


def endings(jobs: Collection[str]) -> dict[str, list[EndedJob]]:
    """The endings of jobs, oldest first, and the present state of jobs that have not ended; by
    accounting, or else by what slurmctld remembers. Unknown jobs are left out."""
    by_job = accounted(jobs) if jobs else {}
    for job in jobs:
        if job not in by_job and (last := last_state(job)):
            by_job[job] = [last]
    return by_job


def last_state(job: str, timeout_s: float = TIMEOUT_S) -> EndedJob | None:
    """The state of a job that slurmctld remembers (for MinJobAge seconds), or None.

    Tasks of an array that was cancelled before any task began are listed under the array's id only,
    which says nothing of a task as long as others wait.
    """
    for known_as in dict.fromkeys((job, job.partition("_")[0])):
        text = _said("scontrol", "--oneliner", "show", "job", known_as, timeout_s=timeout_s)
        if len(text.splitlines()) == 1:
            fields = dict(word.split("=", 1) for word in text.split() if "=" in word)
            when = fields.get("PreemptTime", "None")
            known = EndedJob(
                fields.get("JobState", ""),
                fields.get("ExitCode", ""),
                fields.get("NodeList", ""),
                preempted=when not in ("None", "Unknown", "N/A"),
                reason=fields.get("Reason", ""),
            )
            if known_as == job or known.is_over:
                return known
    return None


def known_to_controller(job: str) -> QueuedJob | None:
    """A job that waits or runs by the controller's own word, since a site may answer ``squeue``
    from a cache; None if it does neither."""
    now = last_state(job)
    if now is None or now.is_over or not now.state:
        return None
    return QueuedJob(job=job, state=now.word, reason=now.reason, nodes=now.nodes)


def accounted(jobs: Collection[str], timeout_s: float = TIMEOUT_S) -> dict[str, list[EndedJob]]:
    """The endings of jobs by accounting, oldest first; none without accounting."""
    columns = "--format=JobID,State,ExitCode,NodeList"
    flags = ("--allusers", "--allocations", "--duplicates", "--noheader", "--parsable2")
    asked = ",".join(sorted({job.partition("_")[0] for job in jobs}))
    by_job: dict[str, list[EndedJob]] = {}
    listed = _said("sacct", "--jobs", asked, *flags, columns, timeout_s=timeout_s)
    for row in (line.split("|") for line in listed.splitlines()):
        for task in _tasks_of(row[0]) if len(row) == 4 else ():
            by_job.setdefault(task, []).append(EndedJob(row[1], row[2], row[3]))
    return by_job


def _tasks_of(job: str) -> list[str]:
    """The tasks of a job id; ``17_[0-1,5%2]`` stands for several that have not begun."""
    array, bracket, indices = job.partition("_[")
    if not bracket:
        return [job]
    ranges = _RANGE.findall(indices.partition("%")[0])
    spans = [range(int(first), int(last or first) + 1) for first, last in ranges]
    return [f"{array}_{index}" for span in spans for index in span]
