"""Copies of frozen dataclasses. A leaf."""

from __future__ import annotations

from functools import cache, cached_property
from typing import Any, TypeVar

T = TypeVar("T")


def replace(of: T, **values: Any) -> T:
    """As ``dataclasses.replace``, in a fourth of its time, for a class that has neither slots nor a
    ``__post_init__``; a search makes millions of such copies. What properties have cached is not
    copied. Raises TypeError for what is no field."""
    copy, mine = object.__new__(type(of)), {**vars(of), **values}
    if len(mine) > len(vars(of)):
        raise TypeError(f"{type(of).__name__} has no field {[*mine][-1]!r}")
    for name in _cached(type(of)):  # type: ignore[arg-type]
        mine.pop(name, None)
    object.__setattr__(copy, "__dict__", mine)
    return copy


@cache
def _cached(kind: type[object]) -> tuple[str, ...]:
    own = (item for each in kind.__mro__ for item in vars(each).items())
    return tuple(name for name, value in own if isinstance(value, cached_property))
