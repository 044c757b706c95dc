"""What faults are made of: where a rank stands, and what is changed of its trainer."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from zeropp.plan import Plan


@dataclass(frozen=True)
class Place:
    """Where this rank stands, and in which plan."""

    plan: Plan
    dp_index: int
    pp: int
    tp: int


Prepare = Callable[[Any], Any]  # a trainer, made faulty
Fault = Callable[[Place], AbstractContextManager[Prepare]]
