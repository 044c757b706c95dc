"""The first use of kernels, before a step on CUDA whose order depends on them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from zeropp.engine.chunk import Chunk, shown
from zeropp.engine.evaluator import same_buffers
from zeropp.engine.loss import Loss, Microbatches


def warm_up(
    chunks: Mapping[int, Chunk],
    batch: Microbatches,
    *,
    loss_fn: Loss,
    device: torch.device,
    last: int,
    splits: bool,
) -> None:
    """Run every chunk, which are by stage, forward and backward once, with zeros for messages.
    ``last`` is the number of the last stage; ``splits``: whether backwards delay weight gradients.
    Persistent buffers and torch's random generators are as before, but the last step's gradients
    are dropped.

    The first use of a kernel, and of a library's workspace, may make the host wait for the whole
    device. In a step that could be for ever, because receives are posted that depend on what this
    rank is yet to send.
    """
    seeds = torch.random.fork_rng([device] if device.type == "cuda" else [])
    with seeds, shown(chunks.values()), same_buffers(chunks.values(), loss_fn):
        for stage, chunk in chunks.items():
            chunk.unshard()
            shapes = chunk.arriving or ()
            inputs = [torch.zeros_like(shape.empty(device)) for shape in shapes]
            inputs = [batch.inputs[0]] if stage == 0 else inputs
            output, loss = chunk.forward(inputs, 0, batch.keywords_of(0))
            if stage == last:
                loss, _ = loss_fn(output, batch, 0)
            if loss is not None:
                chunk.set_loss(0, loss, alone=stage == last)
            shapes = [shape for shape in chunk.leaving or () if shape.has_gradient]
            gradients = [torch.zeros_like(shape.empty(device)) for shape in shapes]
            chunk.backward(0, gradients, split=splits)
            chunk.backward_weight(0)
            chunk.reshard()
            for flat in chunk.flats:  # else the sums of all chunks would be held at once
                flat.clear_gradients()
