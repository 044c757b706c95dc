"""The knobs of ``parallelize``, and the refusal of what is none. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypedDict, get_args, get_type_hints

from zeropp.layout import InfeasibleError
from zeropp.literals import Placement, Recompute, ReduceEvery, WireType


class Knobs(TypedDict, total=False):
    """Those of ``zeropp.plan.Settings`` that the API has, degrees 1 by default."""

    pp: int
    shard: int
    replicate: int
    replicate_zero: Literal[0, 1]
    chunks: int
    unit: int
    activation_cap: int
    reduce_every: ReduceEvery
    replicate_every: ReduceEvery
    reduce_dtype: WireType
    prefetch: int
    keep: int
    placement: Placement
    recompute: Recompute
    compile: bool


def check_knobs(knobs: Mapping[str, object]) -> None:
    """Raise TypeError for a name that is no argument, InfeasibleError for a value that is not one
    of the argument's."""
    kinds = get_type_hints(Knobs)
    for field, value in knobs.items():
        if field not in kinds:
            raise TypeError(
                f"parallelize() got an unexpected keyword argument {field!r} "
                f"(knobs: {', '.join(kinds)})"
            )
        choices = (False, True) if kinds[field] is bool else get_args(kinds[field])
        if choices and value not in choices:
            known = ", ".join(map(repr, choices))
            raise InfeasibleError(f"{field}={value!r}: must be one of {known}")
        least = 0 if field in ("prefetch", "keep") else 1
        if not choices and (type(value) is not int or value < least):
            raise InfeasibleError(f"{field}={value!r}: must be a whole number, at least {least}")
