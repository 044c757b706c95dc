"""Tries whether layers can be recomputed in their backward, before anything is trained.

torch's checkpointing refuses some layers, but only in their first backward, when other ranks wait
already: those that change their inputs in place, those that change in place what selective
recomputation keeps, and those that compute gradients in their forward. So each layer runs forward
and backward once here, on torch's meta device, or with real tensors if it needs values.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode

from zeropp.engine.chunk import run_recomputed
from zeropp.engine.errors import free_frames
from zeropp.engine.values import (
    TensorShape,
    Value,
    chosen,
    keywords_of,
    may_have_gradient,
    tensors_of,
)
from zeropp.layout import InfeasibleError
from zeropp.literals import Recompute

# Finds the sizes of a model's layers by calling each once with the output of the layer before.
#
# The calls run on torch's meta device, which has shapes and number types but no values, so they
# take neither memory nor time. If one fails there (a data-dependent branch needs values), all
# layers are called with real tensors. Copies of the layers are called, so that whatever a layer
# caches in the call does not stay in the caller's layers.


_PRODUCTS = (torch.ops.aten.mm, torch.ops.aten.addmm)
Layer = nn.Module | Callable[[], nn.Module]


@dataclass(frozen=True)
class ParameterKind:
    """A parameter without its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    trained: bool


@dataclass(frozen=True, kw_only=True)
class LayerSizes:
    """The sizes of one layer and of its outputs, for one microbatch.

    ``kinds``: its parameters, each under all of its names. ``parameters``: the number of their
    elements. ``names``: the names of the inputs of its ``forward``. ``product_flops`` and
    ``attention_flops``: floating-point operations of its forward, in matrix products with weights
    and in all others.
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
    """The sizes of all layers, in order; ``sample`` is one microbatch of inputs, and ``keywords``
    are its keyword inputs.

    Raises InfeasibleError with one line that names the first layer that fails, or that returns
    something other than a tensor or a tuple of tensors, or that is a module without values.
    """
    for index, layer in enumerate(layers):
        if isinstance(layer, nn.Module):
            check_values(layer, index)
    try:
        return _run(layers, sample, keywords, for_real=False)
    except InfeasibleError:
        devices = [sample.device] if sample.device.type == "cuda" else []
        with torch.random.fork_rng(devices):  # training draws the same numbers as without a trial
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
        module = copied(layer, index, for_real=for_real)
        try:
            check_shapes(module, index)
            names, kinds = keywords_of(module), _kinds(module)
            _check_in_place(module, index)
            # With parameters that need gradients the counter would add hooks to them.
            module.to(device).requires_grad_(False)
            value = _called(module, tensors_of(value), chosen(keywords, names), counter)
        except InfeasibleError:
            raise
        except Exception as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise InfeasibleError(
                f"layers[{index}]: cannot be called with the output of the layer before: {lines[0]}"
            ) from error
        product_flops, attention_flops = _flops(counter)
        sizes = LayerSizes(
            outputs=tuple(TensorShape(x.shape, x.dtype) for x in _checked(value, index)),
            kinds=kinds,
            parameters=sum(parameter.numel() for parameter in module.parameters()),
            names=names,
            product_flops=product_flops,
            attention_flops=attention_flops,
        )
        found.append(sizes)
    return found


def _called(
    module: nn.Module, inputs: Sequence[Tensor], keywords: Mapping[str, Tensor], counter: Any
) -> Value:
    """What a layer returns, while ``counter`` counts its operations. A layer that calls
    ``torch.autograd.grad`` in its forward cannot run with the counter, so it counts as 0."""
    with torch.no_grad():
        try:
            with counter:
                value: Value = module(*inputs, **keywords)
                return value
        except RuntimeError as error:
            if "autograd.grad()" not in str(error):
                raise
        return module(*inputs, **keywords)  # type: ignore[no-any-return]


def check_shapes(module: nn.Module, index: int) -> None:
    """Raise InfeasibleError for a layer with a parameter that has no shape yet or is not plain, or
    that something else trains in parallel."""
    for name, parameter in module.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise InfeasibleError(
                f"layers[{index}]: {name!r} has no shape yet (call the layer once, as torch's "
                "lazy modules need it)"
            )
        if isinstance(parameter, DTensor) or parameter.is_inference():
            kind = "a DTensor" if isinstance(parameter, DTensor) else "an inference tensor"
            raise InfeasibleError(
                f"layers[{index}]: {name!r} is {kind}, but a plain parameter is needed (hand over "
                "layers that nothing else has sharded, made outside of torch.inference_mode)"
            )
    if any(isinstance(part, DistributedDataParallel) for part in module.modules()):
        raise InfeasibleError(
            f"layers[{index}]: is in a DistributedDataParallel, which would add gradients up a "
            "second time (hand over the module inside it)"
        )


def _check_in_place(module: nn.Module, index: int) -> None:
    """Refuse layers whose forward changes their own parameters, which are copies of the masters."""
    for name, part in module.named_modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.max_norm is not None:
            raise InfeasibleError(
                f"layers[{index}]: {name or 'it'} has max_norm={part.max_norm}, which changes the "
                "weight during the forward; no rank would keep that (normalise what it gives)"
            )


def _flops(counter: FlopCounterMode) -> tuple[int, int]:
    """(operations in products with weights, all others)."""
    flops = counter.get_flop_counts().get("Global", {})
    products = sum(count for operator, count in flops.items() if operator in _PRODUCTS)
    return products, sum(flops.values()) - products


def _kinds(module: nn.Module) -> dict[str, ParameterKind]:
    """A layer's parameters by name; a parameter that it has twice is there under both names."""
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
        f"layers[{index}]: returns {type(value).__name__}{inside}, but a layer must return a "
        "tensor or a tuple of tensors (wrap the layer, so that it returns one)"
    )


def check_values(module: nn.Module, index: int) -> None:
    """Raise InfeasibleError for a layer that is to be trained and has no values to begin with."""
    for name, one in (*module.named_parameters(), *module.named_buffers()):
        if one.is_meta:
            raise InfeasibleError(
                f"layers[{index}]: {name!r} is on the meta device and has no values (give a "
                "function that makes the layer, and call parallelize outside of torch.device)"
            )


def copied(layer: Layer, index: int, *, for_real: bool) -> nn.Module:
    """A copy of a layer, or a new one from its function; on the meta device unless ``for_real``."""
    try:
        if not for_real:
            return on_meta(layer)
        return copy.deepcopy(layer) if isinstance(layer, nn.Module) else layer()
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        what = "copied" if isinstance(layer, nn.Module) else "made"
        raise InfeasibleError(
            f"layers[{index}]: cannot be {what}, but its sizes are found with a copy: {lines[0]} "
            "(give a function that makes the layer)"
        ) from error


def on_meta(layer: Layer) -> nn.Module:
    """The layer on the meta device, which takes no memory: a copy of a module, or a new module if
    ``layer`` is a function."""
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


# What layers keep for their backward: bytes per microbatch, found on torch's meta device.


def saved_bytes(
    layers: Sequence[Layer], sample: Tensor, keywords: Mapping[str, Tensor]
) -> list[int]:
    """Bytes that autograd keeps of each layer for one microbatch, parameters aside, in the number
    types in which the layers were given.

    Raises InfeasibleError, in one line, for a layer that cannot run without values.
    """
    value: Value = sample.to("meta")
    keywords = {name: tensor.to("meta") for name, tensor in keywords.items()}
    found = []
    for index, layer in enumerate(layers):
        module = on_meta(layer)
        own = [parameter.untyped_storage() for parameter in module.parameters()]
        kept: list[torch.UntypedStorage] = []

        def keep(
            tensor: Tensor,
            own: list[torch.UntypedStorage] = own,
            kept: list[torch.UntypedStorage] = kept,
        ) -> Tensor:
            storage = tensor.untyped_storage()  # the same object for all views of it
            if not any(storage is other for other in (*own, *kept)):
                kept.append(storage)
            return tensor

        try:
            with torch.enable_grad(), saved_tensors_hooks(keep, lambda tensor: tensor):
                inputs = [x.detach() for x in tensors_of(value)]
                value = module(*inputs, **chosen(keywords, keywords_of(module)))
        except Exception as error:
            raise InfeasibleError(
                f"layers[{index}]: cannot run on the meta device, so its memory is not known and "
                "nothing can be 'auto'"
            ) from error
        found.append(sum(storage.nbytes() for storage in kept))
    return found


def check_recompute(
    layers: Sequence[Layer], sample: Tensor, keywords: Mapping[str, Tensor], recompute: Recompute
) -> None:
    """Raise InfeasibleError, in one line, for the first layer that cannot be recomputed in this
    way. The first and the last layer are never recomputed. ``sample`` is one microbatch of inputs,
    and ``keywords`` are its keyword inputs."""
    if recompute == "none":
        return
    on_cpu = sample.device.type == "cpu"
    try:
        _rehearse(layers, sample.to("meta"), keywords, recompute, on_cpu=on_cpu)
    except InfeasibleError as error:
        # Torch 2.11 applies the hooks of a failed checkpoint to others until its frame is gone.
        free_frames(error)
        devices = [sample.device] if sample.device.type == "cuda" else []
        with torch.random.fork_rng(devices):  # training draws the same numbers as without this
            _rehearse(layers, sample, keywords, recompute, on_cpu=on_cpu)


def _rehearse(
    layers: Sequence[Layer],
    sample: Tensor,
    keywords: Mapping[str, Tensor],
    recompute: Recompute,
    *,
    on_cpu: bool,
) -> None:
    value: Value = sample
    keywords = {name: tensor.to(sample.device) for name, tensor in keywords.items()}
    for index, layer in enumerate(layers):
        module = copied(layer, index, for_real=not sample.is_meta).to(sample.device)
        how: Recompute = recompute if 0 < index < len(layers) - 1 else "none"
        if how == "selective" and on_cpu:
            _check_recurrent(module, index)
        function = partial(module, **chosen(keywords, keywords_of(module)))
        try:
            value = _there_and_back(function, tensors_of(value), how)
        except Exception as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise InfeasibleError(
                f"layers[{index}]: cannot be recomputed with recompute={recompute!r}: {lines[0]} "
                "(take another recompute, or change the layer: no operations in place, for example)"
            ) from error


def _check_recurrent(module: nn.Module, index: int) -> None:
    """Refuse layers with torch's recurrent modules: on CPUs these change the outputs of their
    products in place where torch does not notice it, and gradients would be wrong."""
    for part in module.modules():
        if isinstance(part, nn.RNNBase | nn.RNNCellBase):
            raise InfeasibleError(
                f"layers[{index}]: {type(part).__name__} cannot be recomputed with "
                "recompute='selective', because it changes in place what that keeps (take 'full')"
            )


def _there_and_back(
    function: partial[Value], inputs: Sequence[Tensor], recompute: Recompute
) -> Value:
    """What a layer returns for these inputs, without a graph, after a backward through it."""
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_(may_have_gradient(x.dtype)) for x in inputs]
        given = [x.clone() for x in leaves]  # a layer may change no leaf in place, but these
        value = run_recomputed(function, *given, recompute=recompute, random=True)
    outputs = [x for x in tensors_of(value) if x.requires_grad]
    if outputs and recompute != "none":
        torch.autograd.backward(outputs, [torch.ones_like(x) for x in outputs])
    return tuple(x.detach() for x in tensors_of(value))
