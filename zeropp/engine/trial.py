"""What passes between layers: each is called once with the output of the one before.

The call costs neither memory nor time where a layer runs on torch's meta device, which knows
shapes and types alone. A layer that asks for values there (a data-dependent branch) is tried for
real, on a copy: nothing that a layer remembers of its trial stays with the caller's layers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zeropp.layout import InfeasibleError

Layer = nn.Module | Callable[[], nn.Module]


@dataclass(frozen=True)
class LayerSizes:
    """One layer's output for one microbatch, and how many parameters the layer has."""

    output_size: torch.Size
    output_dtype: torch.dtype
    parameters: int  # elements


def try_layers(layers: Sequence[Layer], sample: Tensor) -> list[LayerSizes]:
    """Sizes of every layer, in order; ``sample`` is one microbatch of inputs.

    Raises InfeasibleError with one line that names the layer which fails, or whose output is not
    one tensor.
    """
    try:
        return _run(layers, sample, for_real=False)
    except InfeasibleError:
        devices = [sample.device] if sample.device.type == "cuda" else []
        with torch.random.fork_rng(devices):  # what is drawn in a trial is drawn again later
            return _run(layers, sample, for_real=True)


def _run(layers: Sequence[Layer], sample: Tensor, *, for_real: bool) -> list[LayerSizes]:
    found = []
    x = sample if for_real else sample.to("meta")
    for index, layer in enumerate(layers):
        try:
            module = _real_copy(layer) if for_real else _meta_copy(layer)
            with torch.no_grad():
                x = module.to(x.device)(x)
        except Exception as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise InfeasibleError(
                f"layers[{index}]: cannot be called with the output of the layer before: {lines[0]}"
            ) from error
        if not isinstance(x, Tensor):
            raise InfeasibleError(
                f"layers[{index}]: returns {type(x).__name__}, but exactly one tensor passes "
                "from layer to layer (wrap the layer, so that it returns one)"
            )
        parameters = sum(parameter.numel() for parameter in module.parameters())
        found.append(LayerSizes(x.shape, x.dtype, parameters))
    return found


def _real_copy(layer: Layer) -> nn.Module:
    return copy.deepcopy(layer) if isinstance(layer, nn.Module) else layer()


def _meta_copy(layer: Layer) -> nn.Module:
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
