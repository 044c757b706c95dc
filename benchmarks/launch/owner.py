"""Which process works on a folder, and whether it may still be alive.

A process that starts an attempt or holds a lock first writes an ``owner.json`` into the folder, and
touches that file while it works, which is its heartbeat. A reader decides in this order:

1. The owner runs on this boot of this machine and in this process namespace: then the process table
   says whether it lives. Its start time shows if the process id was reused.
2. The owner ran on this machine and host name before the last boot: it is dead.
3. Otherwise (another host or container) the owner cannot be seen from here: it counts as alive as
   long as its heartbeat is not older than ``SILENT_S``.

An age is the difference of two times from the same file system, so that differences between the
clocks of hosts do not matter.
"""

from __future__ import annotations

import json
import os
import socket
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from benchmarks.records.record import write_atomically

OWNER_FILE = "owner.json"
BEAT_S = 10.0
QUIET_S = 90.0  # an attempt whose job is gone is over after this silence; it beats every 20 s
SILENT_S = 900.0  # an owner that cannot be seen and is silent for so long counts as dead


@dataclass(frozen=True, kw_only=True)
class Owner:
    """The identity of a process among all processes on all machines."""

    user: int
    host: str
    machine: str  # /etc/machine-id; empty if there is none
    boot: str  # boot id of the kernel
    namespace: str  # of process ids: containers have their own
    pid: int
    started: str  # clock ticks since boot; tells a reused process id

    @property
    def text(self) -> str:
        """The owner as text for messages."""
        return f"process {self.pid} of user {self.user} on {self.host}"


_ADAPTER = TypeAdapter(Owner)


def this_process() -> Owner:
    """This process as an owner."""
    pid = os.getpid()
    machine, boot, namespace = _machine()
    return Owner(
        user=os.getuid(),
        host=socket.gethostname(),
        machine=machine,
        boot=boot,
        namespace=namespace,
        pid=pid,
        started=state_and_start(pid)[1],
    )


def claim(directory: Path) -> None:
    """Make this process the owner of a folder."""
    write_atomically(directory / OWNER_FILE, json.dumps(asdict(this_process())))


def beat(directory: Path) -> None:
    """Renew the heartbeat of this process in a folder, at most every ``BEAT_S`` seconds. It is no
    error if the folder cannot be written to."""
    path = directory / OWNER_FILE
    try:
        if abs(time.time() - path.stat().st_mtime) > BEAT_S:
            os.utime(path)
    except OSError:
        return


def release(directory: Path) -> None:
    """Remove the owner from a folder whose work is done."""
    try:
        (directory / OWNER_FILE).unlink(missing_ok=True)
    except OSError:
        return


def read_owner(directory: Path) -> Owner | None:
    """The owner of a folder; None if no readable file names one."""
    try:
        return _ADAPTER.validate_json((directory / OWNER_FILE).read_bytes())
    except (OSError, ValidationError):
        return None


def may_live(directory: Path) -> bool:
    """Whether the owner of a folder may still be at work; true in case of doubt."""
    owner = read_owner(directory)
    known = _known(owner) if owner else None
    return silence_s(directory) < SILENT_S if known is None else known


def silence_s(directory: Path) -> float:
    """Seconds since a file in the folder was last written, by the clock of the file system."""
    newest = 0.0
    for path in (directory, *directory.glob("*")):
        try:
            newest = max(newest, path.stat().st_mtime)
        except OSError:
            continue
    return _file_system_now(directory) - newest


def _known(owner: Owner) -> bool | None:
    """Whether an owner lives; None if that cannot be seen from here."""
    machine, boot, namespace = _machine()
    if owner.boot == boot and (boot or owner.host == socket.gethostname()):
        return _lives(owner) if owner.namespace == namespace else None
    rebooted = machine and owner.machine == machine and owner.host == socket.gethostname()
    return False if rebooted else None


def _lives(owner: Owner) -> bool:
    try:
        os.kill(owner.pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass  # the process exists, and belongs to another user
    state, started = state_and_start(owner.pid)
    return state != "Z" and started in ("", owner.started)


def _machine() -> tuple[str, str, str]:
    """(machine id, boot id, process namespace); those that the system does not give are empty."""
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = ""
    return _line("/etc/machine-id"), _line("/proc/sys/kernel/random/boot_id"), namespace


def _line(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def state_and_start(pid: int) -> tuple[str, str]:
    """(state, start time in clock ticks since boot) of a process; empty if there is none, or if
    they are hidden. A process that has got the number of an earlier one has another start time."""
    fields = _line(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return (fields[0], fields[19]) if len(fields) > 19 else ("", "")


def _file_system_now(directory: Path) -> float:
    """The time that the file system would give a file now, or the host's if it is read-only."""
    try:
        with tempfile.TemporaryFile(dir=directory.parent) as probe:
            return os.fstat(probe.fileno()).st_mtime
    except OSError:
        return time.time()
