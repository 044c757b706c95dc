"""Whether an attempt is alive: whether the process behind it may still be at work.

Whoever works on an attempt holds a lock on its file ``alive`` and touches it every
``BEAT_S`` seconds. On the machine that wrote the file, the lock decides: the kernel drops it when
the process ends, however it ends. Elsewhere, and for Slurm's scripts,
which only touch the file, a heartbeat of the last ``QUIET_S`` seconds decides. An age is the
difference of two times of the same file system, so that the clocks of hosts do not matter.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from socket import gethostname
from threading import Event, Thread

ALIVE = "alive"
BEAT_S = 20.0
QUIET_S = 90.0


@contextmanager
def keep_alive(file: Path) -> Iterator[None]:
    """Hold ``alive`` and keep it fresh inside this context, for a folder that may be renamed."""
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
    over = Event()

    def beat() -> None:
        while not over.wait(BEAT_S):
            with suppress(OSError):
                os.utime(descriptor)

    thread = Thread(target=beat, daemon=True)
    try:
        with suppress(OSError):  # a file system without locks: the heartbeat alone will do
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.write(descriptor, gethostname().encode())
        thread.start()
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
