"""A lock on a runs folder, so that only one process works in it, also from several hosts.

The lock is a folder that names its owner. It gets its name by a rename, which succeeds for only one
of two processes on every shared file system. A lock whose owner is dead is taken over; ``owner``
says how that is decided. While the lock is held, a thread keeps up its heartbeat.
"""

from __future__ import annotations

import errno
import math
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread

from benchmarks.launch.owner import BEAT_S, beat, claim, may_live, read_owner, this_process

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
