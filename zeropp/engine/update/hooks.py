"""What hooks and optimizers may not do: a rank has shards of parameters, or some whole ones, so a
number over all of a tensor, such as a norm, is not that of a parameter or of the model."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn
from unittest import mock
from weakref import ref

from torch import Tensor
from torch.nn.utils import clip_grad

from zeropp.engine.private_names import TorchDispatchMode, tree_leaves

_GROUPED = "_group_tensors_by_device_and_dtype"  # by which torch takes norms and clips
_grouped = getattr(clip_grad, _GROUPED)
_allowed = False  # the model itself takes a norm


@contextmanager
def allowed() -> Iterator[None]:
    """Inside this context the model takes the norm of all ranks."""
    global _allowed
    _allowed = True
    try:
        yield
    finally:
        _allowed = False


@contextmanager
def refusing_numbers_of_a_rank(shards: Iterable[Tensor]) -> Iterator[None]:
    """Inside this context torch's clipping by a norm raises RuntimeError, and so does what makes
    fewer numbers of one of the flat ``shards`` or of its gradient."""

    def grouped(*given: Any, **named: Any) -> Any:
        by_element = sys._getframe(1).f_code.co_name == "clip_grad_value_"
        return _grouped(*given, **named) if _allowed or by_element else _refuse()

    # Which are read when they are called, under whatever name their caller has imported them.
    with (
        mock.patch.object(clip_grad, "_get_total_norm", _refuse),
        mock.patch.object(clip_grad, _GROUPED, grouped),
        _ShardWatch(shards),
    ):
        yield


def _refuse(*_: object, **__: object) -> NoReturn:
    raise RuntimeError(
        "optimizer: it, or a hook of it, takes a norm, a mean or a part of what this rank alone "
        "has of the model (clip with model.clip_grad_norm_ or clip_norm=; register a hook that "
        "looks at one parameter after another in the function that makes the optimizer, which "
        "then gets whole parameters, and say no elementwise=)"
    )


class _ShardWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows shards, their gradients and what has as many numbers made of them."""

    def __init__(self, shards: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        every = (x for one in shards for x in (one, one.grad) if x is not None)
        self._known = {id(x): ref(x) for x in every}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run one operator."""
        given = max((sum(x.numel() for x in self._of(one)) for one in args), default=0)
        made = function(*args, **(kwargs or {}))
        if given and not _allowed:
            outputs = [x for x in tree_leaves(made) if isinstance(x, Tensor)]
            if outputs and not function.is_view and sum(x.numel() for x in outputs) < given:
                _refuse()
            self._known |= {id(x): ref(x) for x in outputs}
        return made

    def _of(self, argument: Any) -> list[Tensor]:
        """The tensors of an argument that are followed."""
        leaves = [x for x in tree_leaves(argument) if isinstance(x, Tensor)]
        return [x for x in leaves if id(x) in self._known and self._known[id(x)]() is x]
