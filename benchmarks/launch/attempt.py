"""One attempt at a point: its folder, how it ended, and its record.

An attempt is a folder ``RUNS_DIR/<point>/<launcher>-...``. It holds what it was started with
(``spec.json``, and ``attempt.json``, the ``Header``), the event files and logs of its ranks, a file
``alive`` (``benchmarks.launch.attempt``), and at its end ``record.json``, which is written once and
never changed.

**Alive.** Whoever works on an attempt holds a lock on its file ``alive`` and touches it every
``BEAT_S`` seconds. On the host that wrote the file, the lock decides: the kernel drops it when the
process ends, however it ends. Elsewhere, and for Slurm's scripts, which only touch the file, a
heartbeat of the last ``QUIET_S`` seconds decides. An age is the difference of two times of the same
file system, so that the clocks of hosts do not matter.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from socket import gethostname
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from benchmarks.records.environment import read_code
from benchmarks.records.events import Events, measured, of_kind, rank_of, read_events
from benchmarks.records.record import (
    SCHEMA_VERSION,
    RunRecord,
    Status,
    now,
    write_atomically,
)
from benchmarks.records.recorded_spec import unchecked
from benchmarks.specification.reading import adapter
from zeropp.types.timeline import Provenance

if TYPE_CHECKING:  # planning takes long to import, and a job that ends does not plan
    from benchmarks.specification.run_spec import RunSpec
    from zeropp.schedule.plan import Plan

ALIVE = "alive"
BEAT_S = 20.0
QUIET_S = 90.0
PROVENANCE: dict[str, Provenance] = {
    "local": "measured",
    "slurm": "measured",
    "trace": "traced",
    "replay": "replayed",
    "simulate": "simulated",
}
# Errors of a file system, node or network that may not happen again, so that the point runs again.
_PASSING = re.compile(
    r"no space left|quota exceeded|read-only file system|stale file handle|input/output error|"
    r"node failure|communication connection failure|address already in use|EADDRINUSE|"
    r"invalid job\b|"  # srun's, of a controller that has begun anew
    r"job credential (expired|revoked)",  # srun's, of a node that has just come back
    re.I,
)
_NO_CAUSE = re.compile(  # lines of logs that only say that something ended
    r"^\s*$|lacks support for cpu binding|force terminated|terminated$|job step aborted|"
    r"(STEP|JOB) .* ON .* CANCELLED|^slurm\S+: error: (\*\*\*|_|unable to unlink)|"
    r"task \d+.*: exited|^Try \"",
    re.I,
)
HINTS = {9: "; often the system's, for lack of memory"}  # by signal, for those who read its name
_UNPRINTABLE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x1f\x7f\ud800-\udfff]")
_LOG_BYTES = 20_000  # bytes at the end of a log that are read


@contextmanager
def keep_alive(file: Path) -> Iterator[None]:
    """Hold ``alive`` and keep it fresh inside this context, for a folder that may be renamed."""
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
    over = Event()

    def beat() -> None:
        while not over.wait(BEAT_S):
            with suppress(OSError):
                os.utime(descriptor)

    try:
        with suppress(OSError):  # a file system without locks: the heartbeat alone will do
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.write(descriptor, gethostname().encode())
        Thread(target=beat, daemon=True).start()
        yield
    finally:
        over.set()
        os.close(descriptor)


def is_open(folder: Path) -> bool:
    """Whether this is a folder that this user may look into; another user's may be closed."""
    return folder.is_dir() and os.access(folder, os.R_OK | os.X_OK)


def is_alive(attempt: Path) -> bool:
    """Whether the process behind an attempt may be at work, by the rule above."""
    try:
        with (attempt / ALIVE).open("rb") as file:
            if file.read() == gethostname().encode():
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return False
        return age_s(attempt / ALIVE) < QUIET_S
    except BlockingIOError:  # its lock is held
        return True
    except OSError:
        return False


def age_s(path: Path) -> float:
    """Seconds since a file was written, by the clock of its file system (by the host's if it is
    read-only); raises OSError."""
    written = path.stat().st_mtime
    try:
        with tempfile.TemporaryFile(dir=path.parent) as probe:
            return os.fstat(probe.fileno()).st_mtime - written
    except OSError:
        return time.time() - written


class DamagedError(ValueError):
    """No record of an attempt can be made; the message is one line that names the file."""


@dataclass(frozen=True, kw_only=True)
class Header:
    """The content of ``attempt.json``; its fields are also those of the record."""

    launcher: str
    provenance: Provenance
    started_at: str  # ISO 8601, UTC
    git_sha: str  # the launcher's code; a record has that of rank 0 instead, if it says it
    git_dirty: bool
    code_digest: str
    variant: str = ""
    plan: dict[str, Any] = field(default_factory=dict)


launched_code = lru_cache(read_code)  # what this process has imported does not change


def new_header(launcher: str, plan: Plan | None = None, variant: str = "") -> Header:
    """The header of an attempt that starts now."""
    code = launched_code()
    return Header(
        launcher=launcher,
        provenance=PROVENANCE[launcher],
        started_at=now(),
        git_sha=code.sha,
        git_dirty=code.dirty,
        code_digest=code.digest,
        variant=variant,
        plan=plan_summary(plan) if plan else {},
    )


def plan_summary(plan: Plan) -> dict[str, Any]:
    """The part of a plan that a record keeps."""
    return {
        "layout": asdict(plan.layout),
        "cuts": list(plan.cuts),
        "schedule": plan.schedule.name,
        "num_microbatches": plan.num_microbatches,
        "unit": plan.schedule.unit,
        "recompute": plan.recompute,
        "recomputed": list(plan.recomputed),
        "reduce_every": plan.reduce_every,
        "predicted_memory": [asdict(memory) for memory in plan.memory],
    }


def freeze(spec: RunSpec, header: Header, directory: Path) -> None:
    """Write the files that ranks and the end of the attempt read: the spec, and the header."""
    write_atomically(directory / "spec.json", json.dumps(spec.to_dict(), indent=1))
    write_atomically(directory / "attempt.json", json.dumps(asdict(header), indent=1))


def frozen(directory: Path) -> tuple[dict[str, Any], Header]:
    """(spec as a plain mapping, header) of a folder; raises DamagedError if they cannot be read."""
    spec = read_object(directory / "spec.json")
    if not isinstance(spec.get("num_gpus"), int):
        raise DamagedError(f"{directory / 'spec.json'}: no spec (num_gpus is missing)")
    path = directory / "attempt.json"
    try:
        return spec, adapter(Header).validate_python(read_object(path))
    except ValidationError as error:
        raise DamagedError(f"{path}: {error.errors(include_url=False)[0]['msg']}") from None


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; raises DamagedError, which names the file and the mistake."""
    try:
        document = json.loads(path.read_bytes())
    except OSError as error:
        raise DamagedError(f"{path}: {(error.strerror or str(error)).lower()}") from None
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{path}: not readable as JSON ({error})") from None
    if not isinstance(document, dict):
        raise DamagedError(f"{path}: no JSON object")
    return document


@contextmanager
def started(spec: RunSpec, header: Header, runs_dir: Path) -> Iterator[Path]:
    """The folder of an attempt that this process keeps alive inside this context.

    It gets its name only after it is held, so that no other process takes it for abandoned.
    """
    point = runs_dir / spec.spec_id
    point.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=".new-", dir=point))
    fresh.chmod(0o755)  # mkdtemp closes folders to others, but others may ask for the status
    with keep_alive(fresh / ALIVE):
        freeze(spec, header, fresh)
        yield fresh.rename(point / _new_name(header.launcher))


def _new_name(launcher: str) -> str:
    return f"{launcher}-{datetime.now(UTC).strftime('%Y%m%dT%H%M%S-%f')}"


@dataclass(frozen=True)
class Ending:
    """How an attempt ended. ``interrupted`` means from outside, so that it is worth running
    again."""

    status: Status
    reason: str = ""  # one line; empty if the status is ok
    interrupted: bool = False


OK = Ending("ok")


def failed(reason: str) -> Ending:
    """A failure for this reason, which is an interruption if it may not happen again."""
    return Ending("failed", reason, interrupted=bool(_PASSING.search(reason)))


def killed(rank: int, number: int) -> Ending:
    """The ending of an attempt in which a signal killed one rank."""
    name = signal.Signals(number).name + HINTS.get(number, "")
    return Ending("failed", f"rank {rank} was killed by signal {number} ({name})", interrupted=True)


def exited(rank: int, code: int, events: Events | None) -> Ending | None:
    """The ending of an attempt in which one rank ended with this exit code before the others; None
    if its ``events`` say it better. They are None if it has not even a file for them.

    A program that ends by itself will do so again. But Python ends with 1 after an error that a
    full disk kept from the rank's file, and a wrapper of a killed program with 128 + the signal.
    """
    ends = ("error", "oom", "signal", "done")
    if any(x["event"] in ends or x.get("passed") is False for x in events or ()):
        return None
    if code > 128 and code - 128 in set(signal.Signals):
        return killed(rank, code - 128)
    return Ending("failed", f"rank {rank}: exit code {code}", events is not None and code <= 1)


def read_ranks(directory: Path) -> dict[int, Events]:
    """The complete events of every rank that wrote a file, by rank."""
    numbered = ((rank_of(path), path) for path in sorted(directory.glob("rank_*.jsonl")))
    return {rank: read_events(path) for rank, path in numbered if rank is not None}


def ending_by_events(num_ranks: int, ranks: Mapping[int, Events]) -> Ending | None:
    """How the attempt ended, by the events of its ranks; None if they do not say it."""
    gate = measured(ranks)["gate"]
    if gate is not None and not gate.passed:
        return Ending("failed", gate.words())
    ends = [
        (event["event"] != "oom", event["time"], rank, event)
        for rank, events in ranks.items()
        for event in of_kind(events, "oom", "error", "signal")
    ]
    if ends:
        _, _, rank, event = min(ends, key=lambda end: end[:3])
        if event["event"] == "signal":
            return Ending("failed", f"rank {rank} left on {event['name']}", interrupted=True)
        # An exception may have no message (``assert``, ``MemoryError``).
        lines = [line for line in event["message"].splitlines() if line.strip()]
        reason = ": ".join([f"rank {rank}", event["type"], *lines[:1]])
        return Ending("oom", reason) if event["event"] == "oom" else failed(reason)
    return OK if is_complete(num_ranks, ranks) else None


def _progress(ranks: Mapping[int, Events]) -> str:
    """How far ranks were when time was up: which of them were behind the others, and which did not
    answer the signal to end, as one that stands still."""
    steps = {rank: len(of_kind(events, "warmup", "step")) for rank, events in ranks.items()}
    least, most = min(steps.values(), default=0), max(steps.values(), default=0)
    behind = ", ".join(str(rank) for rank in steps if steps[rank] < most)
    deaf = [str(rank) for rank, events in ranks.items() if not of_kind(events, "signal")]
    words = f"; steps done: {least}" if most else ""
    words += f" by rank {behind}, {most} by others" if behind else ""
    return words + f"; rank {', '.join(deaf)} did not answer" * (0 < len(deaf) < len(ranks))


def is_complete(num_ranks: int, ranks: Mapping[int, Events]) -> bool:
    """Whether every rank measured everything; then it does not matter what happened later."""
    return sum(bool(of_kind(events, "done")) for events in ranks.values()) == num_ranks


def last_words(log: Path) -> str:
    """The last line of a log that may be a cause, with all that srun said; empty if there is
    none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _LOG_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    causes = [x.strip() for x in lines if not _NO_CAUSE.search(x.strip())]
    if causes and causes[-1].startswith("srun: "):  # its last line is the consequence
        causes = ["; ".join(dict.fromkeys(x for x in causes if x.startswith("srun: ")))]
    return causes[-1][:300] if causes else ""


def make_record(
    spec_id: str,
    attempt: str,
    spec: Mapping[str, Any],
    header: Header,
    ending: Ending,
    ranks: Mapping[int, Events] | None = None,
    **more: Any,
) -> RunRecord:
    """The record of an attempt that has ended, from the events of its ranks if there were any;
    ``more`` are other fields of RunRecord."""
    fields = asdict(header) | measured(ranks or {}, header.plan, header.code_digest) | more
    if ranks and (why := unchecked(spec)):
        fields["notes"] = [*fields["notes"], f"not compared with one process as usual: {why}"]
    return RunRecord(
        schema_version=SCHEMA_VERSION,
        record_id=f"{spec_id}/{attempt}",
        spec_id=spec_id,
        spec=dict(spec),
        ended_at=now(),
        **asdict(replace(ending, reason=_UNPRINTABLE.sub("", ending.reason))),
        **fields,
    )


def finish_attempt(
    directory: Path,
    ending: Ending | None = None,
    *,
    slurm: Mapping[str, Any] | None = None,
    num_ranks: int | None = None,
) -> RunRecord:
    """Write ``record.json`` and return the record.

    ``ending`` is what the launcher saw and the ranks could not write (a signal, a time limit); if
    it is None, the events say how the attempt ended. ``num_ranks`` is the number of ranks that were
    started, if these were not all. Raises DamagedError if the spec or the header cannot be read,
    and OSError if nothing can be written, or if somebody closed the attempt before its end.
    """
    record = close_attempt(directory, ending, slurm, num_ranks)
    if record is None:
        raise FileExistsError(
            f"{directory / 'record.json'}: is there, and no record is overwritten"
        )
    return record


def close_attempt(
    directory: Path,
    ending: Ending | None,
    slurm: Mapping[str, Any] | None = None,
    num_ranks: int | None = None,
) -> RunRecord | None:
    """Write the record of an attempt whose own process may no longer do it; returns None if it has
    got a record meanwhile. The arguments, and what it raises, are as of ``finish_attempt``."""
    spec, header = frozen(directory)
    ranks, expected = read_ranks(directory), num_ranks or spec["num_gpus"]
    ending = ending or ending_by_events(expected, ranks)
    if ending is None:
        done = sum(bool(of_kind(events, "done")) for events in ranks.values())
        silent = f"{expected - done} of {expected} ranks ended without saying why"
        ending = Ending("failed", silent, interrupted=True)
    if ending.status == "timeout":
        ending = replace(ending, reason=ending.reason + _progress(ranks))
    point, name = directory.resolve().parts[-2:]
    record = make_record(point, name, spec, header, ending, ranks, slurm=dict(slurm or {}))
    return record if record.write(directory / "record.json") else None


def close_abandoned(runs_dir: Path) -> list[str]:
    """Write the records of attempts whose launcher is dead, from their event files; returns one
    line per attempt that cannot be recorded. Attempts that are alive are left alone."""
    problems = []
    for launcher in ("local", "trace"):
        for directory in sorted(runs_dir.glob(f"*/{launcher}-*")):
            is_begun = is_open(directory) and any(directory.iterdir())
            if not is_begun or (directory / "record.json").exists() or is_alive(directory):
                continue
            try:
                close_attempt(
                    directory, Ending("failed", "the launcher was killed", interrupted=True)
                )
            except (DamagedError, OSError) as error:
                problems.append(str(error))
    return problems


def write_unstarted(
    spec: RunSpec, runs_dir: Path, header: Header, ending: Ending, **more: Any
) -> RunRecord:
    """Write the record of an attempt for which no rank was started, and return it. Raises
    OSError."""
    name = _new_name(header.launcher)
    record = make_record(spec.spec_id, name, spec.to_dict(), header, ending, **more)
    record.write(runs_dir / spec.spec_id / name / "record.json")
    return record


def or_unwritten(spec: RunSpec, launcher: str, run: Callable[[], RunRecord]) -> RunRecord:
    """The record that ``run`` returns. If files cannot be written (full disk, read-only folder),
    one that says so and is nowhere: the sweep goes on, and the point counts as missing."""
    try:
        return run()
    except OSError as error:
        reason = f"not recorded: {error.filename or 'a file'}: {error.strerror or error}"
        ending = Ending("failed", reason, interrupted=True)
        name = f"{launcher}-unwritten"
        return make_record(spec.spec_id, name, spec.to_dict(), new_header(launcher), ending)
