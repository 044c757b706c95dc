"""What layers keep for their backward: bytes per microbatch, found on torch's meta device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from zeropp.engine.trial import Layer, on_meta
from zeropp.engine.values import Value, chosen, keywords_of, tensors_of
from zeropp.layout import InfeasibleError


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
