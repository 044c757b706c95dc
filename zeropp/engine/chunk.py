"""One model chunk on its rank: forward, backward in two halves, over sharded parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from zeropp.engine.deferred import WeightGradStore
from zeropp.engine.recompute import run_recomputed
from zeropp.engine.sharding import ChunkShards
from zeropp.literals import Recompute


@dataclass
class _Live:
    """What one microbatch keeps between its forward and its input gradient.

    The output itself is not kept, only where its gradient enters the graph: its memory is free
    once it is sent.
    """

    input: Tensor
    output: GradientEdge | None  # None: nothing before it has a gradient


class Chunk:
    """Pieces that run one after another on this rank.

    Linear layers of ``deferrable`` pieces put off their weight gradients while ``store`` is open.
    ``recompute`` full checkpoints each deferrable piece (a transformer block); selective keeps
    the outputs of its matrix products and of attention and recomputes the rest. ``recomputed``:
    only so many of them, the first ones; None: all. ``compiled``:
    deferrable pieces run through torch.compile. ``seed`` is called with a piece's index in the
    chunk and the microbatch before every piece runs; None where nothing is seeded. ``random``:
    pieces may draw random numbers, and what is recomputed must draw the same ones again. ``first``:
    the input is the batch's and needs no gradient.
    """

    def __init__(
        self,
        shards: ChunkShards,
        store: WeightGradStore,
        deferrable: list[nn.Module],
        recompute: Recompute,
        compiled: bool,
        seed: Callable[[int, int], None] | None,
        *,
        random: bool,
        first: bool,
        recomputed: int | None = None,
    ) -> None:
        self.shards = shards
        self._seed, self._random, self._first = seed, random, first
        self.store = store
        self._recompute = recompute
        self._recomputed = {id(piece) for piece in deferrable[:recomputed]}
        self._live: dict[int, _Live] = {}
        if compiled:
            for piece in deferrable:
                piece.compile()

    def forward(self, x: Tensor, microbatch: int) -> Tensor:
        """Run the pieces on one microbatch and keep what backward needs."""
        self.shards.wait()
        if x.is_floating_point() and not self._first:
            x = x.detach().requires_grad_()
        output = x
        for index, piece in enumerate(self.shards.pieces):
            if self._seed is not None:
                self._seed(index, microbatch)
            output = self._run_piece(piece, output)
        self._live[microbatch] = _Live(x, _edge(output))
        return output

    def _run_piece(self, piece: nn.Module, x: Tensor) -> Tensor:
        recompute = self._recompute if id(piece) in self._recomputed else "none"
        return run_recomputed(piece, x, recompute, random=self._random)

    def set_output(self, microbatch: int, output: Tensor) -> None:
        """Replace what backward starts from (the last stage's loss)."""
        self._live[microbatch].output = _edge(output)

    def backward(
        self, microbatch: int, grad: Tensor | None, *, split: bool = False
    ) -> Tensor | None:
        """Gradient of the chunk's input (None for tokens); frees the microbatch's graph. ``split``:
        linear layers put off their weight gradients until ``backward_weight``."""
        self.shards.wait()
        live = self._live.pop(microbatch)
        if live.output is not None:
            self.shards.make_gradients(deferred=not split)
            if split:
                self.store.begin(microbatch)
            torch.autograd.backward(live.output, grad)
            self.store.end()
        return live.input.grad

    def backward_weight(self, microbatch: int) -> None:
        """The weight gradients that ``backward`` put off; needs no gathered parameters."""
        self.shards.make_gradients(deferred=True)
        self.store.run(microbatch)


def _edge(output: Tensor) -> GradientEdge | None:
    return get_gradient_edge(output) if output.requires_grad else None
