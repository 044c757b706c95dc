"""A layer that is to be recomputed runs forward and backward once, before anything is trained."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from zeropp.engine.chunk import run_recomputed
from zeropp.engine.values import Value, tensors_of
from zeropp.engine.walk import leaves_of
from zeropp.types.layout import InfeasibleError
from zeropp.types.literals import Recompute


def recomputed(
    function: Callable[..., Value],
    given: Value,
    module: nn.Module,
    recompute: Recompute,
) -> None:
    """Run a layer with recomputation, forward and backward; raises what torch raises, and
    RuntimeError if buffers change in both."""
    with torch.enable_grad():
        value = run_recomputed(function, *leaves_of(given), recompute=recompute, random=True)
    before = {name: (id(one), one._version) for name, one in module.named_buffers()}
    outputs = [x for x in tensors_of(value) if x.requires_grad]
    if outputs:
        torch.autograd.backward(outputs, [torch.ones_like(x) for x in outputs])
    for name, one in module.named_buffers():
        if before.get(name) != (id(one), one._version):
            raise RuntimeError(f"its forward changes the buffer {name!r}, and would do so twice")


def check_recurrent(module: nn.Module, index: int, recompute: Recompute) -> None:
    """Refuse layers with torch's recurrent modules: on CPUs these change the outputs of their
    products in place where torch does not notice it, and gradients would be wrong."""
    for part in module.modules():
        if recompute == "selective" and isinstance(part, nn.RNNBase | nn.RNNCellBase):
            raise InfeasibleError(
                f"layers[{index}]: {type(part).__name__} cannot be recomputed with "
                "recompute='selective', because it changes in place what that keeps (take 'full')"
            )
