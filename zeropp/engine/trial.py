"""What passes between layers: each is called once with the output of the one before.

The call costs neither memory nor time where a layer runs on torch's meta device, which knows
shapes and types alone. A layer that asks for values there (a data-dependent branch) is tried for
real, on a copy: nothing that a layer remembers of its trial stays with the caller's layers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from zeropp.engine.values import TensorShape, Value, chosen, keywords_of, tensors_of
from zeropp.layout import InfeasibleError

_PRODUCTS = (torch.ops.aten.mm, torch.ops.aten.addmm)
Layer = nn.Module | Callable[[], nn.Module]


@dataclass(frozen=True)
class ParameterKind:
    """What is known of a parameter without its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    trained: bool


@dataclass(frozen=True)
class LayerSizes:
    """What one layer gives and takes for one microbatch.

    ``kinds``: its parameters, each under all its names; ``parameters``: their elements; ``names``:
    what its ``forward`` calls its inputs; ``product_flops`` and ``attention_flops``: floating-point
    operations of its forward, in products with weights and in all others.
    """

    outputs: tuple[TensorShape, ...]
    kinds: Mapping[str, ParameterKind]
    parameters: int
    names: frozenset[str]
    product_flops: int
    attention_flops: int


def try_layers(
    layers: Sequence[Layer], sample: Tensor, keywords: Mapping[str, Tensor]
) -> list[LayerSizes]:
    """Sizes of every layer, in order; ``sample`` is one microbatch of inputs, and ``keywords`` are
    its keyword inputs.

    Raises InfeasibleError with one line that names the layer which fails, or which returns
    something else than a tensor or a tuple of tensors.
    """
    try:
        return _run(layers, sample, keywords, for_real=False)
    except InfeasibleError:
        devices = [sample.device] if sample.device.type == "cuda" else []
        with torch.random.fork_rng(devices):  # what is drawn in a trial is drawn again later
            return _run(layers, sample, keywords, for_real=True)


def _run(
    layers: Sequence[Layer], sample: Tensor, keywords: Mapping[str, Tensor], *, for_real: bool
) -> list[LayerSizes]:
    found = []
    device = sample.device if for_real else torch.device("meta")
    value: Value = sample.to(device)
    keywords = {name: tensor.to(device) for name, tensor in keywords.items()}
    for index, layer in enumerate(layers):
        counter = FlopCounterMode(display=False)
        try:
            module = _real_copy(layer) if for_real else on_meta(layer)
            names, kinds = keywords_of(module), _kinds(module)
            _check_in_place(module, index)
            # The counter hooks into what needs gradients, also where none are computed.
            module.to(device).requires_grad_(False)
            value = _called(module, tensors_of(value), chosen(keywords, names), counter)
        except InfeasibleError:
            raise
        except Exception as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise InfeasibleError(
                f"layers[{index}]: cannot be called with the output of the layer before: {lines[0]}"
            ) from error
        outputs = tuple(TensorShape(x.shape, x.dtype) for x in _checked(value, index))
        parameters = sum(parameter.numel() for parameter in module.parameters())
        flops = counter.get_flop_counts().get("Global", {})
        products = sum(count for operator, count in flops.items() if operator in _PRODUCTS)
        others = sum(flops.values()) - products
        found.append(LayerSizes(outputs, kinds, parameters, names, products, others))
    return found


def _called(
    module: nn.Module, inputs: Sequence[Tensor], keywords: Mapping[str, Tensor], counter: Any
) -> Value:
    """What a layer gives, its operations counted. A layer that takes gradients inside itself cannot
    run while they are counted; it counts as none."""
    with torch.no_grad():
        try:
            with counter:
                value: Value = module(*inputs, **keywords)
                return value
        except RuntimeError as error:
            if "autograd.grad()" not in str(error):
                raise
        return module(*inputs, **keywords)  # type: ignore[no-any-return]


def _check_in_place(module: nn.Module, index: int) -> None:
    """Refuse layers whose forward changes their own parameters, which are copies of the masters."""
    for name, part in module.named_modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.max_norm is not None:
            raise InfeasibleError(
                f"layers[{index}]: {name or 'it'} has max_norm={part.max_norm}, which changes the "
                "weight during the forward; no rank would keep that (normalise what it gives)"
            )


def _kinds(module: nn.Module) -> dict[str, ParameterKind]:
    """A layer's parameters by name; one that it has twice, under both names."""
    return {
        name: ParameterKind(tuple(one.shape), one.dtype, one.requires_grad)
        for name, one in module.named_parameters(remove_duplicate=False)
    }


def _checked(value: object, index: int) -> tuple[Tensor, ...]:
    """The tensors of a layer's output."""
    values = value if isinstance(value, tuple) else (value,)
    strange = next((x for x in values if not isinstance(x, Tensor)), None)
    if values and all(isinstance(x, Tensor) for x in values):
        return values
    inside = f" with {type(strange).__name__} in it" if isinstance(value, tuple) else ""
    raise InfeasibleError(
        f"layers[{index}]: returns {type(value).__name__}{inside}, but a tensor or a tuple of "
        "tensors passes from layer to layer (wrap the layer, so that it returns one)"
    )


def _real_copy(layer: Layer) -> nn.Module:
    return copy.deepcopy(layer) if isinstance(layer, nn.Module) else layer()


def on_meta(layer: Layer) -> nn.Module:
    """The layer without values: its tensors are on the meta device, and take no memory."""
    if not isinstance(layer, nn.Module):
        with torch.device("meta"):
            return layer()
    empty: dict[int, object] = {}
    for parameter in layer.parameters():
        meta = torch.empty_like(parameter, device="meta")
        empty[id(parameter)] = nn.Parameter(meta, requires_grad=parameter.requires_grad)
    for buffer in layer.buffers():
        empty[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(layer, empty)
