"""The layers of DeepSpeed's ``PipelineModule``, each built by a function of this suite.

With tied embeddings the first and the last layer share the embedding's weight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import Tensor, nn

from baselines.deepspeed_3d.tensor_parallel import cut_logits

_TIED = "embedding"  # the name under which DeepSpeed finds the layers that share a weight
TIED_NAME = f"tied_modules.{_TIED}"


class Factory(nn.Module):
    """A layer type for DeepSpeed's ``LayerSpec``, which builds layers from a type and arguments:
    making one calls ``make(index)`` and returns that module."""

    def __new__(cls, make: Callable[[int], nn.Module], index: int) -> Any:
        return make(index)


def tie(
    layers: list[LayerSpec], make: Callable[[int], nn.Module], group: dist.ProcessGroup
) -> list[LayerSpec]:
    """The layers for tied embeddings: the head computes its logits with the embedding's weight.

    As always with DeepSpeed's tied layers, every stage that uses the embedding holds a copy, and
    the copies' gradients are summed.
    """

    def make_norm(index: int) -> nn.Module:
        head = make(index)
        del head.output
        head.forward = head.norm.forward  # type: ignore[union-attr]
        return head

    def logits(embedding: nn.Module, x: Tensor) -> Tensor:
        return cut_logits(x, embedding.tokens.weight, group)  # type: ignore[union-attr, arg-type]

    last = len(layers) - 1
    tied = {"tied_weight_attr": ["tokens.weight"]}
    return [
        TiedLayerSpec(_TIED, Factory, make, 0, **tied),
        *layers[1:-1],
        LayerSpec(Factory, make_norm, last),
        TiedLayerSpec(_TIED, Factory, make, 0, forward_fn=logits, **tied),
    ]
