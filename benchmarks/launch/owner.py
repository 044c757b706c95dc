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

import errno
import json
import math
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Event, Thread

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


# A lock on a runs folder, so that only one process works in it, also from several hosts.
#
# The lock is a folder that names its owner. It gets its name by a rename, which succeeds for only
# one of two processes on every shared file system. A lock whose owner is dead is taken over;
# ``owner`` says how that is decided. While the lock is held, a thread keeps up its heartbeat.


_POLL_S = 0.5


class LockedError(RuntimeError):
    """Another process holds the lock and has not released it in time; the message is one line."""


@contextmanager
def only_one(
    lock: Path, purpose: str, say: Callable[[str], None], wait_s: float = math.inf
) -> Iterator[None]:
    """Hold the folder ``lock`` inside this context.

    If another process holds it, this says so once and waits; ``purpose`` is what a holder does, as
    in "submits into this folder". Raises LockedError after ``wait_s`` seconds, and OSError if the
    folder cannot be written to.
    """
    lock.parent.mkdir(parents=True, exist_ok=True)
    deadline, said = time.monotonic() + wait_s, False
    while not _take(lock):
        if not may_live(lock) and _take_away(lock):
            continue
        owner = read_owner(lock)
        who = owner.text if owner else "another process"
        if time.monotonic() > deadline:
            raise LockedError(f"{lock}: held by {who} for {wait_s:g} s (remove it if that is gone)")
        if not said:
            say(f"waiting for {who}, which {purpose}")
            said = True
        time.sleep(_POLL_S)
    over = Event()
    thread = Thread(target=_beat_until, args=(over, lock), daemon=True)
    try:
        thread.start()
        yield
    finally:
        over.set()
        thread.join()
        _take_away(lock, mine=True)


def _beat_until(over: Event, lock: Path) -> None:
    while not over.wait(BEAT_S):
        beat(lock)


def _take(lock: Path) -> bool:
    """Try to become the holder; raises OSError if no folder can be made."""
    fresh = Path(tempfile.mkdtemp(prefix=f"{lock.name}-new-", dir=lock.parent))
    try:
        fresh.chmod(0o755)
        claim(fresh)
        fresh.rename(lock)
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
            return False
        # An NFS client whose answer got lost asks again, although the folder was renamed.
        if error.errno == errno.ENOENT and read_owner(lock) == this_process():
            return True
        raise
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    _clear_remains(lock)
    return True


def _clear_remains(lock: Path) -> None:
    """Remove the temporary folders of processes that were killed while they took or released the
    lock."""
    for kind in ("new", "old"):
        for path in lock.parent.glob(f"{lock.name}-{kind}-*"):
            if not may_live(path):
                shutil.rmtree(path, ignore_errors=True)


def _take_away(lock: Path, *, mine: bool = False) -> bool:
    """Remove this process's lock, or that of a dead owner; returns whether it was moved aside. If
    several processes try, only one can move it."""
    aside = Path(tempfile.mkdtemp(prefix=f"{lock.name}-old-", dir=lock.parent))
    moved = aside / "lock"
    try:
        lock.rename(moved)
        if not mine and may_live(moved):  # another process was faster: this is its new lock
            moved.rename(lock)
    except OSError:
        return False
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return True
