"""The keyword arguments of ``zeropp.parallelize`` that set ZeroPP's knobs. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, TypedDict, get_args, get_origin, get_type_hints

from zeropp.contender.knobs import ZeroppKnobs
from zeropp.layout import InfeasibleError
from zeropp.literals import Placement, Recompute, ReduceEvery, StageStyle, WireType


class Keywords(TypedDict, total=False):
    """The knobs of ``ZeroppKnobs`` that ``parallelize`` accepts. None of them may be ``auto``;
    degrees and ``chunks`` are 1 unless given."""

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
    stage_style: StageStyle
    split_backward: bool
    placement: Placement
    recompute: Recompute
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
    choices = (False, True) if kind is bool else get_args(kind)
    if choices and value not in choices:
        known = ", ".join(map(repr, choices))
        raise InfeasibleError(f"{field}={value!r}: must be one of {known}")
    if not choices and type(value) is not int:
        raise InfeasibleError(f"{field}={value!r}: must be a whole number")
    annotated = get_type_hints(ZeroppKnobs, include_extras=True).get(field)
    for limit in get_args(annotated)[1:] if get_origin(annotated) is Annotated else ():
        try:
            limit.check(value)
        except ValueError as error:
            raise InfeasibleError(f"{field}={value!r}: {error}") from None
