"""A lock on a runs folder, so that only one process submits into it, also from several hosts.

The lock is a folder that names its owner. It gets its name by a rename, which succeeds for only one
of two processes on every shared file system. A lock whose owner is dead is taken over; ``owner``
says how that is decided.
"""

from __future__ import annotations

import errno
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.launch.owner import beat, claim, may_live, read_owner

_POLL_S = 0.5
_WAIT_S = 1800.0  # enough for a submission of many arrays with a slow sbatch


class LockedError(RuntimeError):
    """Another process holds the lock and has not released it in time; the message is one line."""


@contextmanager
def only_one(
    directory: Path, say: Callable[[str], None], wait_s: float = _WAIT_S
) -> Iterator[Callable[[], None]]:
    """Hold ``directory/.lock`` inside this context, which gives a heartbeat: a function that must
    be called now and then.

    If another process holds the lock, this says so once and waits. Raises LockedError after
    ``wait_s`` seconds, and OSError if the folder cannot be written to.
    """
    directory.mkdir(parents=True, exist_ok=True)
    lock, deadline, said = directory / ".lock", time.monotonic() + wait_s, False
    while not _take(lock):
        owner = read_owner(lock)
        who = owner.text if owner else "another process"
        if not may_live(lock):
            _take_away(lock)
            continue
        if time.monotonic() > deadline:
            raise LockedError(f"{lock}: held by {who} for {wait_s:g} s (remove it if that is gone)")
        if not said:
            say(f"waiting for {who}, which submits into this folder")
            said = True
        time.sleep(_POLL_S)
    try:
        yield lambda: beat(lock)
    finally:
        _take_away(lock, mine=True)


def _take(lock: Path) -> bool:
    fresh = Path(tempfile.mkdtemp(prefix=".lock-new-", dir=lock.parent))
    try:
        fresh.chmod(0o755)
        claim(fresh)
        fresh.rename(lock)
        return True
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
        return False
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _take_away(lock: Path, *, mine: bool = False) -> None:
    """Remove this process's lock, or that of a dead owner; if several processes try, only one can
    move it aside."""
    aside = Path(tempfile.mkdtemp(prefix=".lock-old-", dir=lock.parent))
    moved = aside / "lock"
    try:
        lock.rename(moved)
        if not mine and may_live(moved):  # another process was faster: this is its new lock
            moved.rename(lock)
    except OSError:
        pass
    shutil.rmtree(aside, ignore_errors=True)
