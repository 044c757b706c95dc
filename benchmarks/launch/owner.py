"""Who works on a folder, and whether that process can still be alive.

Whoever starts an attempt or holds a lock writes an ``owner.json`` into it first, and touches it
while it works: that is its heartbeat. A reader decides in this order:

1. The owner ran on this boot of this machine and in this process namespace: the process table
   tells, with the start time against a reused number. Another user's process is a process.
2. The owner ran before this machine was booted, seen from the same host name and machine: dead.
3. Anything else (another host, another container) cannot be seen from here: alive as long as its
   heartbeat is not older than ``SILENT_S``.

Ages are differences of times that the same file system gave, so clocks of hosts do not matter.
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
QUIET_S = 90.0  # heartbeats come every 20 s at least, and shared file systems show them late
SILENT_S = 900.0  # a host that cannot be seen and is silent for so long counts as dead


@dataclass(frozen=True)
class Owner:
    """A process, named so that no other process on any machine has the same name."""

    user: int
    host: str
    machine: str  # /etc/machine-id; empty where there is none
    boot: str  # boot id of the kernel
    namespace: str  # of process ids: containers have their own
    pid: int
    started: str  # clock ticks since boot; tells a reused process id

    @property
    def text(self) -> str:
        """For a line that a person reads."""
        return f"process {self.pid} of user {self.user} on {self.host}"


_ADAPTER = TypeAdapter(Owner)


def this_process() -> Owner:
    """The process that calls."""
    pid = os.getpid()
    return Owner(os.getuid(), socket.gethostname(), *_machine(), pid, state_and_start(pid)[1])


def claim(directory: Path) -> None:
    """Write this process into a folder as its owner."""
    write_atomically(directory / OWNER_FILE, json.dumps(asdict(this_process())))


def beat(directory: Path) -> None:
    """Say that the owner is still at work, every ``BEAT_S`` at most; a folder that cannot be
    written to is no error here."""
    path = directory / OWNER_FILE
    try:
        if abs(time.time() - path.stat().st_mtime) > BEAT_S:
            os.utime(path)
    except OSError:
        return


def release(directory: Path) -> None:
    """Take the owner out of a folder whose work is done."""
    try:
        (directory / OWNER_FILE).unlink(missing_ok=True)
    except OSError:
        return


def read_owner(directory: Path) -> Owner | None:
    """The owner of a folder; None where no readable file names one."""
    try:
        return _ADAPTER.validate_json((directory / OWNER_FILE).read_bytes())
    except (OSError, ValidationError):
        return None


def may_live(directory: Path) -> bool:
    """Whether the owner of a folder may still be at work; yes when in doubt."""
    owner = read_owner(directory)
    known = _known(owner) if owner else None
    return silence_s(directory) < SILENT_S if known is None else known


def silence_s(directory: Path) -> float:
    """Seconds since anything in a folder was last written, by the file system's own clock."""
    newest = 0.0
    for path in (directory, *directory.glob("*")):
        try:
            newest = max(newest, path.stat().st_mtime)
        except OSError:
            continue
    return _file_system_now(directory) - newest


def _known(owner: Owner) -> bool | None:
    """Whether an owner lives; None where that cannot be seen from here."""
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
        pass  # a process of another user
    state, started = state_and_start(owner.pid)
    return state != "Z" and started in ("", owner.started)


def _machine() -> tuple[str, str, str]:
    """Machine id, boot id and process namespace; empty where the system does not say."""
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
    """State and start time (clock ticks since boot) of a process: two processes that had the same
    number one after the other differ in it. Empty where there is none, or where it is hidden."""
    fields = _line(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return (fields[0], fields[19]) if len(fields) > 19 else ("", "")


def _file_system_now(directory: Path) -> float:
    """The time that the file system would give a file now; the host's where it is read-only."""
    try:
        with tempfile.TemporaryFile(dir=directory.parent) as probe:
            return os.fstat(probe.fileno()).st_mtime
    except OSError:
        return time.time()
