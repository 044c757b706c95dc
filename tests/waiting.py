"""How tests wait: for a state, and not for a time."""

from __future__ import annotations

import time
from collections.abc import Callable

LIMIT_S = 400.0  # ends what hangs; nothing is expected to take nearly as long


def wait_until(condition: Callable[[], object], what: str, every_s: float = 0.2) -> None:
    """Ask every few seconds until the condition holds; raises TimeoutError that names what did
    not come."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {LIMIT_S:g} s")
        time.sleep(every_s)
