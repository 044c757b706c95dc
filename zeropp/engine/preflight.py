"""Checks of the arguments of ``parallelize``, and of the values of layers over the ranks.

If only one rank raised for a wrong argument, the others would wait for it in a collective. So the
caller runs these checks in ``errors.agreed``: all ranks raise what one of them has found.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from zlib import crc32

from torch import Tensor, nn

from zeropp.engine.ranks.errors import gathered, together
from zeropp.engine.ranks.given_rows import checksum
from zeropp.engine.settings import ParameterName
from zeropp.engine.walk import Layer, ParameterKind, check_layer, shared_parameter
from zeropp.types.layout import InfeasibleError
from zeropp.types.literals import Precision

Tied = tuple[ParameterName, ParameterName]


def with_equal_values(make: Callable[[], dict[int, nn.Module]]) -> dict[int, nn.Module]:
    """The layers that ``make`` gives this rank, by their index in the model; refuses ranks that
    hold the same layer with other values. All ranks must call it."""

    def made() -> tuple[dict[int, nn.Module], dict[int, dict[str, object]]]:
        held = make()
        return held, {index: _values(index, layer) for index, layer in held.items()}

    held, own = together(made)
    first: dict[int, tuple[int, dict[str, object]]] = {}
    for rank, layers in enumerate(gathered(own)):
        for index, values in layers.items():
            owner, expected = first.setdefault(index, (rank, values))
            for name in expected | values:
                if repr(expected.get(name)) != repr(values.get(name)):  # NaN equals itself here
                    raise InfeasibleError(
                        f"layers[{index}]: {name!r} is not the same on ranks {owner} and {rank} "
                        "(seed all ranks alike before the layers are made, or load a checkpoint)"
                    )
    return held


def _values(index: int, layer: nn.Module) -> dict[str, object]:
    """What must be equal on all ranks that train a layer: shapes, types, and values, as checksums,
    of parameters and buffers.

    Raises InfeasibleError for a parameter that is NaN throughout: an earlier model has kept only
    shards of it.
    """
    values: dict[str, object] = {}
    parameters = dict(layer.named_parameters())
    for name, one in {**parameters, **dict(layer.named_buffers())}.items():
        values[name] = (tuple(one.shape), str(one.dtype), one.requires_grad, int(checksum(one)))
        some = one.numel() and name in parameters and not one.is_meta
        if some and math.isnan(float(one.detach().flatten()[0].abs())) and bool(one.isnan().all()):
            raise InfeasibleError(
                f"layers[{index}]: {name!r} has no values, only NaN: the layer belongs to another "
                "model that parallelize has made, or was copied from it (make a new layer)"
            )
    return values


def check_layers(
    layers: Sequence[Layer], weights: Sequence[float] | None, tied: Tied | None
) -> None:
    """Raise InfeasibleError for layers that cannot be trained separately.

    A parameter in two layers would be trained twice, each time with a part of its gradient;
    ``tied`` names the only pair that may be shared.
    """
    if not isinstance(layers, Sequence | nn.Sequential | nn.ModuleList):
        raise InfeasibleError(
            f"layers: must be a list of modules, or of functions that make them, but is "
            f"{type(layers).__name__}"
        )
    if not layers:
        raise InfeasibleError("layers=[]: there is nothing to train")
    if weights is not None and (len(weights) != len(layers) or not all(w > 0 for w in weights)):
        raise InfeasibleError(
            f"weights: {len(weights)} numbers for {len(layers)} layers; give one per layer, and "
            "every weight must be more than 0"
        )
    if tied is not None and not 0 <= tied[0][0] < tied[1][0] < len(layers):
        raise InfeasibleError(
            f"tied={tied}: must name parameters of two layers, which are numbered from 0 to "
            f"{len(layers) - 1}"
        )
    _check_not_shared(layers, tied)


def _check_not_shared(layers: Sequence[Layer], tied: Tied | None) -> None:
    owners: dict[int, ParameterName] = {}
    places: dict[int, tuple[int, ParameterName]] = {}  # in memory
    for index, layer in enumerate(layers):
        if not isinstance(layer, nn.Module):
            continue
        check_layer(layer, index)
        for name, parameter in layer.named_parameters():
            before = owners.setdefault(id(parameter), (index, name))
            if before[0] != index and (before, (index, name)) != tied:
                raise shared_parameter(index, name, before)
            if parameter.is_meta or not parameter.numel():
                continue
            other, where = places.setdefault(parameter.data_ptr(), (id(parameter), (index, name)))
            if other != id(parameter) and (where, (index, name)) != tied:
                raise InfeasibleError(
                    f"layers[{index}]: {name!r} is in the same memory as {where[1]!r} of "
                    f"layers[{where[0]}], but is another parameter (make it the same object, or "
                    "clone its values)"
                )


def check_parameters(
    kinds: Sequence[Mapping[str, ParameterKind]], tied: Tied | None, precision: Precision
) -> None:
    """Refuse parameters of 16 bits where layers compute in fp32, and tied parameters that do not
    exist or differ in kind; raises InfeasibleError. ``kinds``: every layer's parameters by name."""
    for index, layer in enumerate(kinds):
        for name, kind in layer.items():
            if precision == "fp32" and kind.dtype.is_floating_point and kind.dtype.itemsize < 4:
                raise InfeasibleError(
                    f"layers[{index}]: {name!r} is {kind.dtype}, but precision='fp32' computes in "
                    "fp32 (call .float() on the layers; for bf16 ask for precision='bf16', too)"
                )
    for index, name in tied or ():
        if name not in kinds[index]:
            raise InfeasibleError(f"tied={tied}: layers[{index}] has no parameter {name!r}")
    ends = [kinds[index][name] for index, name in tied or ()]
    if tied is not None and ends[0] != ends[1]:
        raise InfeasibleError(
            f"tied={tied}: the first is {ends[0]}, but the second {ends[1]}; both must have the "
            "same shape and type, and both be trained or frozen"
        )


def check_keywords(given: Mapping[str, Tensor], rows: int, named: Iterable[frozenset[str]]) -> None:
    """Refuse keyword inputs that nothing takes, that no step can be given, or with other rows than
    the sample; raises InfeasibleError. ``named``: what every layer and the loss function take."""
    known = frozenset[str]().union(*named)
    for name, value in given.items():
        if name in ("inputs", "targets", "outputs"):
            raise InfeasibleError(f"sample_keywords: {name!r} is an argument of every step itself")
        if name not in known:
            raise InfeasibleError(
                f"sample_keywords: {name!r} is named by no layer's forward and not by the loss "
                "function (leave it out, or add a parameter of that name)"
            )
        if not value.dim() or len(value) != rows:
            raise InfeasibleError(
                f"sample_keywords: {name!r} has shape {tuple(value.shape)}, but one row for each "
                f"of the sample's {rows} is needed in dimension 0 (expand it)"
            )


def check_draws(draws: Sequence[bool], seed: int | None) -> None:
    """Refuse layers that draw random numbers without a seed: what is recomputed would have others.
    Raises InfeasibleError."""
    if seed is None and any(draws):
        raise InfeasibleError(
            f"dropout_seed=None: layers[{draws.index(True)}] draws random numbers (give a seed)"
        )


def describe_function(function: Any) -> str:
    """A function's name and what tells its code from another's; what it reads elsewhere (globals,
    what a closure keeps) is not looked at, as it may rightly differ between ranks."""
    if isinstance(function, functools.partial):
        given = [*function.args, *sorted(function.keywords.items())]
        plain = [value for value in given if isinstance(value, str | float | int | tuple)]
        return f"{describe_function(function.func)} {plain}"
    name = getattr(function, "__qualname__", type(function).__qualname__)
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return repr(function) if isinstance(function, nn.Module) else name
    plain = [value for value in code.co_consts if isinstance(value, str | float | int)]
    return f"{name} {crc32(repr((code.co_code, code.co_names, plain)).encode()):08x}"


def check_loss(loss_fn: Any) -> None:
    """Raise InfeasibleError for a loss that is no function, and for a module with parameters of its
    own."""
    if not callable(loss_fn) or isinstance(loss_fn, type):
        raise InfeasibleError(
            f"loss_fn={loss_fn!r}: must be a function of (output of the last layer, targets)"
        )
    if isinstance(loss_fn, nn.Module):
        for name, parameter in loss_fn.named_parameters():
            if parameter.requires_grad:
                raise InfeasibleError(
                    f"loss_fn: has the parameter {name!r}, which nothing would train (put it into "
                    "the last layer, or freeze it)"
                )
