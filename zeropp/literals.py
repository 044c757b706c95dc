"""The values that knobs and plans may have where there is a fixed choice. This module imports
nothing of this project.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

Auto = Literal["auto"]
BlockHalf = Literal["attention", "mlp"]  # each with its norm and its residual add
Axis = Literal["tp", "pp", "shard", "replicate"]
Placement = Literal["dp_inner", "pp_inner"]  # how ranks are numbered; see ``Layout``
Precision = Literal["fp32", "bf16"]
Recompute = Literal["none", "selective", "full"]
ReduceEvery = Literal["unit", "step"]  # how often gradients are reduced
LossReduction = Literal["mean", "sum"]  # what a loss function does over its batch
WireType = Literal["fp32", "bf16"]  # the type in which gradients are sent
ReplicateZero = Literal[0, 1]

T = TypeVar("T")


def if_auto(asked: T | Auto, otherwise: T) -> T:
    """``asked`` itself, or ``otherwise`` if it is ``auto``."""
    return otherwise if asked == "auto" else asked


# Ranges for the fields of dataclasses, written as ``Annotated[int, AT_LEAST_1]``.
#
# Where a dataclass is built from a configuration, pydantic checks them; the public API, which does
# without pydantic, reads the same annotations. This module imports nothing of this project.


@dataclass(frozen=True)
class Range:
    """A condition on numbers, and the words for it. Other values (``auto``, None) are accepted."""

    words: str
    holds: Callable[[float], bool]

    def check(self, value: T) -> T:
        """The value itself; raises ValueError with the words if the condition does not hold."""
        if isinstance(value, int | float):
            if not math.isfinite(value):
                raise ValueError("must be finite")
            if not self.holds(value):
                raise ValueError(f"must be {self.words}")
        return value

    def __get_pydantic_core_schema__(
        self, source: Any, handler: Callable[[Any], Any]
    ) -> dict[str, Any]:
        """Pydantic's hook: check the type first, then the range. The result is what
        ``pydantic_core.core_schema.no_info_after_validator_function`` returns, written out so that
        the library needs no pydantic."""
        check = {"type": "no-info", "function": self.check}
        return {"type": "function-after", "function": check, "schema": handler(source)}


AT_LEAST_0 = Range("at least 0", lambda value: value >= 0)
AT_LEAST_1 = Range("at least 1", lambda value: value >= 1)
MORE_THAN_0 = Range("more than 0", lambda value: value > 0)
FROM_0_TO_1 = Range("from 0 to less than 1", lambda value: 0 <= value < 1)
