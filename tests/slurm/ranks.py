"""Ranks of ``launcher=local`` whose program is the stand-in: they take a second and no torch."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.launch import local

_STAND_IN = Path(__file__).with_name("stand_in.py")


class StandIn(subprocess.Popen[bytes]):
    """What the launcher uses of a process of ``multiprocessing``, from which it differs in its
    start: it is no fork of a launcher that has threads."""

    @property
    def exitcode(self) -> int | None:
        """None while it runs, negative for a signal."""
        return self.poll()

    def join(self, timeout: float) -> None:
        """Wait for its end, at most this many seconds."""
        with suppress(subprocess.TimeoutExpired):
            self.wait(timeout)


def start_stand_in(
    arguments: Sequence[str], *, variables: dict[str, str], log: Path, **_: Any
) -> StandIn:
    """In the place of ``local.start_rank``."""
    with log.open("ab") as file:
        return StandIn(
            [str(_STAND_IN), "-m", "benchmarks.worker", *arguments],
            env=os.environ | variables | {"SUITE_LAUNCHER_PID": str(os.getpid())},
            stdout=file,
            stderr=file,
            start_new_session=True,
        )


def use_stand_ins() -> None:
    """Let this process start no other ranks, and write no reports."""
    from benchmarks.report import write

    local.start_rank = start_stand_in  # type: ignore[assignment]
    write.write_report = lambda *_: None  # type: ignore[assignment]
