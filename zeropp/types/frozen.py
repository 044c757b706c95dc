"""Copies of frozen dataclasses. A leaf."""

from __future__ import annotations

from dataclasses import fields
from functools import cache
from typing import Any, TypeVar

T = TypeVar("T")


def replace(of: T, **values: Any) -> T:
    """As ``dataclasses.replace``, in a tenth of its time, for a class that has neither slots nor a
    ``__post_init__``; a search makes millions of such copies. What properties have cached is not
    copied."""
    copy = object.__new__(type(of))
    names, mine = _names(type(of)), vars(copy)  # type: ignore[arg-type]
    for name, value in vars(of).items():
        if name in names:
            mine[name] = value
    mine.update(values)
    return copy


@cache
def _names(kind: type[Any]) -> frozenset[str]:
    return frozenset(field.name for field in fields(kind))
