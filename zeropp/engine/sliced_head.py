"""The last layer and the loss, slice after slice of a microbatch's tokens.

They are like a stage behind the last one that has no forward of its own: when the backward of a
microbatch begins, each slice runs forward and at once backward. So the logits of one slice, and
their gradient, exist at a time, and nothing is computed twice. (Liger, arXiv 2410.10989, and ALST,
arXiv 2506.13996, section 3.1, make the gradients in the forward.)
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from zeropp.engine.layers.chunk import Chunk
from zeropp.engine.layers.values import Tensors, TensorShape, Value, tensors_of
from zeropp.engine.loss import Loss, Microbatches


class SlicedHead:
    """Runs ``chunk``, which has the last layer alone, and the ``loss`` in ``slices`` parts of the
    tokens, about equally long; in no more than there are tokens. ``without_tokens``: keyword inputs
    that every slice gets whole."""

    def __init__(
        self, chunk: Chunk, loss: Loss, slices: int, without_tokens: Collection[str]
    ) -> None:
        self._chunk, self._loss, self._slices = chunk, loss, slices
        self._without_tokens = without_tokens

    @property
    def modules(self) -> Sequence[nn.Module]:
        """The last layer."""
        return self._chunk.modules

    def output(self, inputs: Value, keywords: Mapping[str, Tensor]) -> Value:
        """What the last layer gives for all tokens, without a graph."""
        return self._chunk.forward(tensors_of(inputs), 0, keywords)[0]

    def run(
        self, inputs: Value, batch: Microbatches, microbatch: int, divisor: float = 1.0
    ) -> tuple[Tensor, Tensor | None, list[Tensor]]:
        """The loss of a microbatch over ``divisor``, and its count if the loss gives one, both
        without dimensions; and the gradients of the ``inputs`` [rows, tokens, ...] that may have
        one. Weight gradients are added. Under ``no_grad`` there are no gradients."""
        detached = [x.detach() for x in tensors_of(inputs)]
        ends = [
            self._slice(tensors, part, divisor)
            for tensors, part in self._cut(detached, batch, microbatch)
        ]
        losses, counts, gradients = zip(*ends, strict=True)
        return (
            torch.stack(losses).sum(),
            None if counts[0] is None else torch.stack(counts).sum(),
            [torch.cat(parts, 1) for parts in zip(*gradients, strict=True)],
        )

    def _cut(
        self, inputs: Tensors, batch: Microbatches, microbatch: int
    ) -> Iterator[tuple[list[Tensor], Microbatches]]:
        """The inputs of every slice, with its targets and keyword inputs."""
        named, slices = batch.keywords_of(microbatch), min(self._slices, inputs[0].shape[1])
        cut = {
            n: x.tensor_split(slices, 1) for n, x in named.items() if n not in self._without_tokens
        }
        columns = [x.tensor_split(slices, 1) for x in (*inputs, batch.targets[microbatch])]
        for place, (*own, target) in enumerate(zip(*columns, strict=True)):
            part = {name: parts[place] for name, parts in cut.items()}
            yield own, Microbatches((), [target], [{**named, **part}])

    def _slice(
        self, inputs: Tensors, part: Microbatches, divisor: float
    ) -> tuple[Tensor, Tensor | None, list[Tensor]]:
        """As ``run``, of one slice."""
        self._chunk.arriving = [TensorShape(x.shape, x.dtype) for x in inputs]
        output, beside = self._chunk.forward(inputs, 0, part.keywords_of(0))
        loss, count = self._loss(output, part, 0)
        del output  # before the backward, in which a slice's gradient of it takes as much
        loss = (loss if beside is None else loss + beside) / divisor
        if not torch.is_grad_enabled():
            return loss, count, []
        self._chunk.set_loss(0, loss, alone=True)
        return loss.detach(), count, self._chunk.backward(0, (), split=True)
