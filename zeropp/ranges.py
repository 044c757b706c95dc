"""Ranges that stand on the fields of dataclasses, as ``Annotated[int, AT_LEAST_1]``.

Pydantic checks them where a dataclass is built from a configuration; the public API, which needs
no pydantic, reads the same annotations. A leaf: it imports nothing of this project.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Range:
    """What a number must be. Values that are no numbers (``auto``, None) pass."""

    words: str
    holds: Callable[[float], bool]

    def check(self, value: T) -> T:
        """The value itself; raises ValueError with the words where it is out of range."""
        if isinstance(value, int | float):
            if not math.isfinite(value):
                raise ValueError("must be finite")
            if not self.holds(value):
                raise ValueError(f"must be {self.words}")
        return value

    def __get_pydantic_core_schema__(
        self, source: Any, handler: Callable[[Any], Any]
    ) -> dict[str, Any]:
        """Pydantic's hook: validate the type first, then the range. The schema is the one that
        ``pydantic_core.core_schema.no_info_after_validator_function`` makes."""
        check = {"type": "no-info", "function": self.check}
        return {"type": "function-after", "function": check, "schema": handler(source)}


AT_LEAST_0 = Range("at least 0", lambda value: value >= 0)
AT_LEAST_1 = Range("at least 1", lambda value: value >= 1)
MORE_THAN_0 = Range("more than 0", lambda value: value > 0)
FROM_0_TO_1 = Range("from 0 to less than 1", lambda value: 0 <= value < 1)
