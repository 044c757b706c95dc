"""Tries whether layers can be recomputed in their backward, before anything is trained.

torch's checkpointing refuses some layers, but only in their first backward, when other ranks wait
already: those that change their inputs in place, those that change in place what selective
recomputation keeps, and those that compute gradients in their forward. So each layer runs forward
and backward once here, on torch's meta device, or with real tensors if it needs values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from zeropp.engine.failed_work import free_frames
from zeropp.engine.recompute import run_recomputed
from zeropp.engine.trial import Layer, copied
from zeropp.engine.values import Value, chosen, keywords_of, may_have_gradient, tensors_of
from zeropp.layout import InfeasibleError
from zeropp.literals import Recompute


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
