"""The keywords of ``parallelize``: those of a settings class, for its signature and for type
checkers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, Concatenate, ParamSpec

from zeropp.engine.loss import LossFunction
from zeropp.engine.walk import Layer
from zeropp.train.parallel_model import ParallelModel

P = ParamSpec("P")
Build = Callable[[Sequence[Layer], LossFunction, dict[str, Any]], ParallelModel]


def with_keywords_of(
    settings: Callable[P, object],
) -> Callable[[Build], Callable[Concatenate[Sequence[Layer], LossFunction, P], ParallelModel]]:
    """A decorator: the function, which is given a dict of all keywords, seems to have the fields of
    ``settings`` as such."""

    def decorate(
        build: Build,
    ) -> Callable[Concatenate[Sequence[Layer], LossFunction, P], ParallelModel]:
        @wraps(build)
        def call(
            layers: Sequence[Layer], loss_fn: LossFunction, /, *args: P.args, **keywords: P.kwargs
        ) -> ParallelModel:
            if args:
                raise TypeError("parallelize: all but layers and loss_fn are keywords (sample=...)")
            return build(layers, loss_fn, keywords)

        first = list(inspect.signature(build).parameters.values())[:2]
        rest = inspect.signature(settings).parameters.values()
        call.__signature__ = inspect.Signature([*first, *rest])  # type: ignore[attr-defined]
        return call

    return decorate
