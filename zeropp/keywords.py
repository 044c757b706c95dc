"""The keyword arguments of ``zeropp.parallelize`` that set ZeroPP's knobs. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, TypedDict, get_args, get_origin, get_type_hints

from zeropp.contender.knobs import ZeroppKnobs
from zeropp.layout import InfeasibleError
from zeropp.literals import Auto, Placement, Recompute, ReduceEvery, StageStyle, WireType


class Keywords(TypedDict, total=False):
    """The knobs of ``ZeroppKnobs`` that the API has; degrees and chunks are 1 by default. ``auto``
    is chosen from what the layers take on the cluster that is named."""

    pp: int | Auto
    shard: int | Auto
    replicate: int | Auto
    replicate_zero: Literal[0, 1]
    chunks: int | Auto
    unit: int | Auto
    activation_cap: int
    reduce_every: ReduceEvery
    replicate_every: ReduceEvery
    reduce_dtype: WireType
    prefetch: int
    keep: int
    stage_style: StageStyle
    split_backward: bool
    placement: Placement
    recompute: Recompute | Auto
    compile: bool


def knobs_of(keywords: Mapping[str, Any], also: Iterable[str] = ()) -> ZeroppKnobs:
    """The knobs that these keyword arguments set; ``also`` names other arguments, for the message.

    Raises TypeError for the first unknown keyword, and InfeasibleError for a value that its keyword
    cannot have; the message is one line.
    """
    known = get_type_hints(Keywords)
    for field, value in keywords.items():
        if field not in known:
            raise TypeError(
                f"parallelize() got an unexpected keyword argument {field!r} "
                f"(there are: {', '.join([*sorted(also), *known])})"
            )
        check(field, value, known[field])
    return ZeroppKnobs(**{"pp": 1, "shard": 1, "replicate": 1, "chunks": 1, **keywords})


def check(field: str, value: object, kind: Any) -> None:
    """Refuse a value that an argument of this type cannot have; raises InfeasibleError."""
    parts = (kind,) if kind in (bool, int) or get_origin(kind) is Literal else get_args(kind)
    words = [word for part in parts for word in ((False, True) if part is bool else get_args(part))]
    if value in words:
        return
    if int not in parts:
        known = ", ".join(map(repr, words))
        raise InfeasibleError(f"{field}={value!r}: must be one of {known}")
    if type(value) is not int:
        more = "".join(f" or {word!r}" for word in words)
        raise InfeasibleError(f"{field}={value!r}: must be a whole number{more}")
    annotated = get_type_hints(ZeroppKnobs, include_extras=True)[field]
    for limit in get_args(annotated)[1:] if get_origin(annotated) is Annotated else ():
        try:
            limit.check(value)
        except ValueError as error:
            raise InfeasibleError(f"{field}={value!r}: {error}") from None
