"""What passes from layer to layer: one tensor or several, and the keyword inputs of a microbatch.

If a layer returns a tuple, the next layer gets its tensors as positional arguments, without the
scalars among them: each scalar is added to the loss of its microbatch. Keyword inputs
(attention masks, positions) belong to a microbatch and not to a layer: every pipeline rank has
those of its own rows, and each layer gets the ones that its ``forward`` names.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

Value = Tensor | tuple[Tensor, ...]
Tensors = Sequence[Tensor]
Key = tuple[int, int]  # stage, microbatch
POSITIONS = "position_ids"  # a keyword input that layers are given if they name it


@dataclass(frozen=True)
class TensorShape:
    """The shape and number type of one tensor that a stage sends to the next."""

    size: torch.Size
    dtype: torch.dtype

    def empty(self, device: torch.device) -> Tensor:
        """An empty tensor of this shape, into which a message can be received."""
        return torch.empty(self.size, dtype=self.dtype, device=device)

    @property
    def has_gradient(self) -> bool:
        """Whether a gradient is sent back for it; token indices and masks have none."""
        return may_have_gradient(self.dtype)


def may_have_gradient(dtype: torch.dtype) -> bool:
    """Whether tensors of a number type can have gradients: real and complex numbers."""
    return dtype.is_floating_point or dtype.is_complex


def tensors_of(value: Value) -> tuple[Tensor, ...]:
    """The tensors that a layer has returned."""
    return value if isinstance(value, tuple) else (value,)


def alike(value: Value, tensors: Tensors) -> Value:
    """Other tensors in the place of those that a layer has returned."""
    return tuple(tensors) if isinstance(value, tuple) else tensors[0]


def without_scalars(value: Value) -> tuple[Value, Tensor | None]:
    """What a layer passes on, and the sum of the scalars beside it, which are losses of their own
    (a router's balance); None without any."""
    if not isinstance(value, tuple):
        return value, None
    is_loss = [not x.dim() and may_have_gradient(x.dtype) for x in value]
    losses = [x for x, scalar in zip(value, is_loss, strict=True) if scalar]
    if not losses or len(losses) == len(value):
        return value, None
    rest = tuple(x for x, scalar in zip(value, is_loss, strict=True) if not scalar)
    return rest[0] if len(rest) == 1 else rest, torch.stack(losses).sum()


def keywords_of(function: Callable[..., Any]) -> frozenset[str]:
    """The parameter names of a function, or of a module's ``forward``; none where Python does not
    know them (functions written in C). A module that takes ``**kwargs`` has those of the modules
    right inside it, too, to which it hands them on, as wrappers do."""
    names = frozenset(_parameters(function))
    if not isinstance(function, nn.Module):
        return names
    if not (takes_all(function) or isinstance(function, nn.ModuleList | nn.ModuleDict)):
        return names
    return names.union(*map(keywords_of, function.children()))


def takes_all(function: Callable[..., Any]) -> bool:
    """Whether a function, or a module's ``forward``, takes ``**kwargs``."""
    return any(one.kind is one.VAR_KEYWORD for one in _parameters(function).values())


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        called = function.forward if isinstance(function, nn.Module) else function
        return inspect.signature(called).parameters
    except ValueError:
        return {}


def said_of(function: Any, what: str) -> Any:
    """What a function, or the one that a ``partial`` is of, says of itself; None if it does not."""
    return getattr(function.func if isinstance(function, partial) else function, what, None)


def chosen(
    keywords: Mapping[str, Tensor], names: frozenset[str], dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """The keyword inputs whose names are among ``names``, in the number type of ``cast``."""
    own = {name: value for name, value in keywords.items() if name in names}
    return dict(zip(own, cast([*own.values()], dtype), strict=True))


def cast(values: Sequence[Tensor], dtype: torch.dtype | None) -> tuple[Tensor, ...]:
    """Floating-point tensors in another number type; None leaves all as they are."""
    if dtype is None:
        return tuple(values)
    return tuple(value.to(dtype) if value.is_floating_point() else value for value in values)
