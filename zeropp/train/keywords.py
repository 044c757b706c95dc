"""The keywords of ``parallelize``: those of a settings class, for its signature, for type checkers
and for messages."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from functools import wraps
from typing import Any, Concatenate, ParamSpec

from zeropp.engine.loss import LossFunction
from zeropp.engine.walk import Layer
from zeropp.train.parallel_model import ParallelModel

P = ParamSpec("P")
Build = Callable[[Sequence[Layer], LossFunction, Sequence[Any], dict[str, Any]], ParallelModel]


def with_keywords_of(
    settings: Callable[P, object],
) -> Callable[[Build], Callable[Concatenate[Sequence[Layer], LossFunction, P], ParallelModel]]:
    """A decorator: the function seems to have the fields of ``settings`` as keywords. It is given
    all arguments but the first two as they were, for ``check_call``."""

    def decorate(
        build: Build,
    ) -> Callable[Concatenate[Sequence[Layer], LossFunction, P], ParallelModel]:
        @wraps(build)
        def call(
            layers: Sequence[Layer], loss_fn: LossFunction, /, *args: P.args, **keywords: P.kwargs
        ) -> ParallelModel:
            return build(layers, loss_fn, args, keywords)

        first = list(inspect.signature(build).parameters.values())[:2]
        rest = inspect.signature(settings).parameters.values()
        call.__signature__ = inspect.Signature([*first, *rest])  # type: ignore[attr-defined]
        return call

    return decorate


def check_call(
    settings: Callable[..., object], positional: Sequence[Any], keywords: dict[str, Any]
) -> None:
    """Raise TypeError for arguments without a name, and for names that ``settings`` has not."""
    if positional:
        raise TypeError(
            "parallelize: takes two positional arguments, layers and the loss function; all others "
            "are keywords (sample=..., global_batch=...)"
        )
    names = inspect.signature(settings).parameters
    for name in keywords:
        if name not in names:
            near = get_close_matches(name, names, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "see zeropp.engine.settings.Settings"
            raise TypeError(f"parallelize: got an unexpected keyword argument {name!r} ({hint})")
    if missing := [name for name in ("sample", "global_batch") if name not in keywords]:
        raise TypeError(f"parallelize: {' and '.join(missing)} must be given")
