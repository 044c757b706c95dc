"""One model chunk on its rank: forward, backward in two halves, over sharded parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from zeropp.engine.deferred import WeightGradStore, defer_weight_grads
from zeropp.engine.recompute import run_recomputed
from zeropp.engine.replicas import Replicas
from zeropp.engine.sharding import ChunkShards
from zeropp.literals import Recompute


@dataclass
class _Live:
    """What one microbatch keeps between its forward and its input gradient.

    The output itself is not kept, only where its gradient enters the graph: its memory is free
    once it is sent.
    """

    input: Tensor
    output: GradientEdge


class Chunk:
    """Pieces that run one after another on this rank.

    Linear layers of ``deferrable`` pieces put off their weight gradients while the store is open.
    ``recompute`` full checkpoints each deferrable piece (a transformer block); selective keeps
    the outputs of its matrix products and of attention and recomputes the rest. ``recomputed``:
    only so many of them, the first ones; None: all. ``compiled``:
    deferrable pieces run through torch.compile. ``seed`` is called with a piece's index in the
    chunk and the microbatch before every piece runs; None where nothing is random.
    """

    def __init__(
        self,
        shards: ChunkShards,
        replicas: Replicas,
        deferrable: list[nn.Module],
        recompute: Recompute,
        compiled: bool,
        seed: Callable[[int, int], None] | None,
        recomputed: int | None = None,
    ) -> None:
        self.shards = shards
        self.replicas = replicas
        self._seed = seed
        self.store = WeightGradStore()
        self._recompute = recompute
        self._recomputed = {id(piece) for piece in deferrable[:recomputed]}
        self._live: dict[int, _Live] = {}
        defer_weight_grads(deferrable, self.store)
        if compiled:
            for piece in deferrable:
                piece.compile()

    def forward(self, x: Tensor, microbatch: int) -> Tensor:
        """Run the pieces on one microbatch and keep what backward needs."""
        self.shards.wait()
        if x.is_floating_point():
            x = x.detach().requires_grad_()
        output = x
        for index, piece in enumerate(self.shards.pieces):
            if self._seed is not None:
                self._seed(index, microbatch)
            output = self._run_piece(piece, output)
        self._live[microbatch] = _Live(x, get_gradient_edge(output))
        return output

    def _run_piece(self, piece: nn.Module, x: Tensor) -> Tensor:
        recompute = self._recompute if id(piece) in self._recomputed else "none"
        return run_recomputed(piece, x, recompute, random=self._seed is not None)

    def set_output(self, microbatch: int, output: Tensor) -> None:
        """Replace what backward starts from (the last stage's loss)."""
        self._live[microbatch].output = get_gradient_edge(output)

    def backward(self, microbatch: int, grad: Tensor | None) -> Tensor | None:
        """Gradient of the chunk's input (None for tokens); frees the microbatch's graph."""
        self.shards.wait()
        live = self._live.pop(microbatch)
        torch.autograd.backward(live.output, grad)
        self.shards.accumulate()
        return live.input.grad

    def backward_weight(self, microbatch: int) -> None:
        """The weight gradients that ``backward`` put off; needs no gathered parameters."""
        self.store.run(microbatch)
        self.shards.accumulate()
