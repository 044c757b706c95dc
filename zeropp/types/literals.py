"""The values that knobs and plans may have where there is a fixed choice. This module imports
nothing of this project.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, fields
from functools import lru_cache
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

Auto = Literal["auto"]
Axis = Literal["tp", "pp", "context", "shard", "replicate"]
Placement = Literal["dp_inner", "pp_inner"]  # how ranks are numbered; see ``Layout``
# "fp8": bf16, but the linear layers of blocks multiply in 8 bits.
Precision = Literal["fp32", "bf16", "fp8"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
# What a recomputed block makes again: all but attention and its products ("selective"), also the
# products that are wider than the block's input ("mlp"), or all that is in it ("full").
Recompute = Literal["none", "selective", "mlp", "full"]
Offloaded = Literal["all", "attention"]  # which tensors of an offloaded block
ReduceEvery = Literal["unit", "step"]  # how often gradients are reduced
LossReduction = Literal["mean", "sum", "tokens"]  # what a loss function does over its batch
WireType = Literal["fp32", "bf16"]  # the type in which gradients are sent
# The types of gradients in a comparison: those that each program's documents recommend, or fp32.
Settings = Literal["users", "equal"]
ReplicateZero = Literal[0, 1, 2]  # the ZeRO stage over the replicas

# How attention sees all tokens where ranks divide sequences. "heads": all-to-alls give each rank
# all tokens of some heads (arXiv 2309.14509). "ring": keys and values go from rank to rank (arXiv
# 2310.01889). "both": heads among ranks of a node, and a ring of these groups (arXiv 2405.07719).
Exchange = Literal["heads", "ring", "both"]

T = TypeVar("T")


def if_auto(value: T | Auto, otherwise: T) -> T:
    """``value`` itself, or ``otherwise`` if it is ``auto``."""
    return otherwise if value == "auto" else value


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
            if isinstance(value, int) and value >= 2**63:
                raise ValueError("must be less than 2^63")
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
SIZE = Range("from 1 to 2^31 - 1", lambda value: 1 <= value < 2**31)
NUM_LAYERS = Range("from 1 to 100,000", lambda value: 1 <= value <= 100_000)  # each is planned
MORE_THAN_0 = Range("more than 0", lambda value: value > 0)
FROM_0_TO_1 = Range("from 0 to less than 1", lambda value: 0 <= value < 1)


_WORDS = {int: "a whole number", float: "a number", bool: "True or False", NoneType: "None"}


def check_fields(settings: Any) -> None:
    """Raise ValueError, in one line, for the first field of a dataclass that has a value which its
    annotation does not allow. What is inside of lists and mappings is not looked at."""
    hints = _hints(cast("Hashable", type(settings)))
    for name in (field.name for field in fields(settings)):
        value, annotation = getattr(settings, name), hints[name]
        ranged = get_origin(annotation) is Annotated
        kind, *limits = get_args(annotation) if ranged else (annotation,)
        kinds = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
        try:
            if not any(_fits(value, each) for each in kinds):
                raise ValueError(f"must be {_in_words(kinds)}")
            for limit in limits:
                limit.check(value)
        except ValueError as error:
            text = repr(value)
            shown = text if "\n" not in text else f"a {type(value).__name__}"
            raise ValueError(f"{name}={shown}: {error}") from None


@lru_cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def _fits(value: object, kind: Any) -> bool:
    """Whether a value is of a kind: a class, a Literal, a Callable or a generic alias."""
    origin, inside = get_origin(kind), get_args(kind)
    if origin is Literal:
        return any(value == word and type(value) is type(word) for word in inside)
    if kind in (int, float):
        return isinstance(value, Integral if kind is int else Real) and not isinstance(value, bool)
    if origin is Callable:
        return callable(value) and not isinstance(value, type)
    if origin is tuple and ... not in inside:
        if not isinstance(value, tuple | list) or len(value) != len(inside):
            return False
        return all(map(_fits, value, inside))
    expected = origin or kind
    return not isinstance(expected, type) or isinstance(value, expected)


def _in_words(kinds: tuple[Any, ...]) -> str:
    words = [repr(word) for kind in kinds for word in get_args(kind) if get_origin(kind) is Literal]
    listed = [f"one of {', '.join(words)}" if len(words) > 1 else f"{words[0]}"] if words else []
    others = (kind for kind in kinds if get_origin(kind) is not Literal)
    return " or ".join([*(_WORDS.get(kind) or _named(kind) for kind in others), *listed])


def _named(kind: Any) -> str:
    if get_origin(kind) is Callable:
        arguments = ", ".join(
            getattr(argument, "__name__", str(argument)) for argument in get_args(kind)[0]
        )
        return f"a function of ({arguments})"
    return str(kind) if get_args(kind) else f"a {kind.__name__}"
