"""One model chunk on its rank: its forward, and its backward in two halves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from zeropp.engine.deferred import WeightGradStore, backward_of_chunk
from zeropp.engine.sharding import ChunkShards
from zeropp.engine.values import (
    TensorShape,
    Value,
    cast,
    chosen,
    keywords_of,
    may_have_gradient,
    tensors_of,
)
from zeropp.literals import Recompute

# Seeds dropout by step, microbatch and piece, so that its masks are the same in every topology.


def seed_piece(seed: int, step: int, microbatch: int, piece: int) -> None:
    """Seed torch's generators, of the CPU and of the current CUDA device, for one piece and
    microbatch of a step.

    ``microbatch`` is an index in the whole global batch: with m microbatches per rank and step, the
    data-parallel rank d has the indices d*m .. (d+1)*m-1. A single process that calls this before
    every piece draws the same numbers as any pipeline.
    """
    mixed = seed
    for part in (step, microbatch, piece):
        mixed = (mixed * 1_000_003 + part) % 2**63
    # Not ``torch.manual_seed``: before CUDA is in use it keeps a stack trace of every call, which
    # takes longer than a small layer.
    torch.default_generator.manual_seed(mixed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed(mixed)


@dataclass
class StepSeeds:
    """The seeds of one rank; ``step`` is the number of steps that are done."""

    seed: int
    first_microbatch: int
    device: torch.device
    step: int = 0

    def set(self, piece: int, microbatch: int) -> None:
        """Seed torch for one piece of the model and one of this rank's microbatches."""
        seed_piece(self.seed, self.step, self.first_microbatch + microbatch, piece)

    @contextmanager
    def drawing(self, step: int) -> Iterator[None]:
        """Inside this context a step draws its random numbers; afterwards torch's generators are as
        before. So what else a rank draws (a batch, for example) does not depend on its stages."""
        self.step = step
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            yield


# Recomputation of one block (none, selective or full), the same for every contender.


Result = TypeVar("Result")

_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


def _policy(context: Any, operator: Any, *arguments: Any, **keywords: Any) -> CheckpointPolicy:
    """Keep what matrix products and attention give (each backend of attention is an operator of
    its own, with these words in its name), and recompute the rest."""
    del context, arguments, keywords
    if operator in _PRODUCTS or "scaled_dot_product" in operator.name():
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def run_recomputed(
    function: Callable[..., Result], *inputs: Tensor, recompute: Recompute, random: bool
) -> Result:
    """``function(*inputs)``, whose backward computes again what ``recompute`` does not keep.

    Full keeps the inputs only; selective also keeps the outputs of matrix products and of
    attention. ``random``: the function may draw random numbers, and the second run must draw the
    same ones.
    """
    if recompute == "none":
        return function(*inputs)
    options: dict[str, Any] = {"preserve_rng_state": random}
    if recompute == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    return checkpoint(function, *inputs, use_reentrant=False, **options)  # type: ignore[no-any-return]


@dataclass(frozen=True, kw_only=True)
class ChunkOptions:
    """How a chunk runs its pieces.

    ``recompute`` full checkpoints each transformer block; selective keeps the outputs of its matrix
    products and of attention and recomputes the rest. ``recomputed``: how many blocks are
    recomputed, from the first on; None: all. ``compiled``: blocks run through torch.compile.
    ``seed`` is called before every piece with the piece's index in the chunk and the microbatch;
    None: nothing is seeded. ``random``: pieces may draw random numbers, and what is recomputed must
    draw the same ones again. ``compute``: floating-point inputs of a piece are cast to this type;
    None leaves them as they are.
    """

    recompute: Recompute = "none"
    recomputed: int | None = None
    compiled: bool = False
    seed: Callable[[int, int], None] | None = None
    random: bool = True
    compute: torch.dtype | None = None


@dataclass
class _Live:
    """What one microbatch keeps between its forward and its backward.

    The outputs themselves are not kept, only where their gradients enter the graph: their memory
    is free once they are sent. An output that depends on nothing trained has None.
    """

    inputs: tuple[Tensor, ...]
    outputs: Sequence[GradientEdge | None]  # one per output that may have a gradient


class Chunk:
    """Pieces that run one after another on this rank.

    Linear layers of ``blocks`` (the chunk's transformer blocks) delay their weight gradients while
    ``store`` is open. ``arriving`` and ``leaving`` are the tensors that come from the stage before
    and go to the next stage; None at an end of the model.
    """

    def __init__(
        self,
        shards: ChunkShards,
        store: WeightGradStore,
        *,
        blocks: Sequence[nn.Module],
        arriving: Sequence[TensorShape] | None,
        leaving: Sequence[TensorShape] | None,
        options: ChunkOptions,
    ) -> None:
        self.shards, self.store = shards, store
        self.arriving, self.leaving = arriving, leaving
        self._options = options
        self._recomputed = {id(block) for block in blocks[: options.recomputed]}
        self._names = [keywords_of(piece) for piece in shards.pieces]
        self.keywords = frozenset[str]().union(*self._names)  # that its pieces name
        self._live: dict[int, _Live] = {}
        if options.compiled:
            for block in blocks:
                block.compile()

    def forward(
        self, inputs: Sequence[Tensor], microbatch: int, keywords: Mapping[str, Tensor]
    ) -> Value:
        """Run the pieces on one microbatch, and keep what its backward needs.

        Returns what the last piece returns, cast to the types that the next stage expects. Raises
        RuntimeError if a tensor has another shape than the next stage expects.
        """
        self.shards.wait()
        begin = inputs
        if self.arriving is not None:
            inputs = [x.detach().requires_grad_(may_have_gradient(x.dtype)) for x in inputs]
            begin = [_Alias.apply(x) for x in inputs]  # type: ignore[no-untyped-call]
        value = self._run(begin, microbatch, keywords)
        if self.leaving is not None:
            self._check_leaving(tensors_of(value))
            value = self._cast_leaving(value)
        self._live[microbatch] = _Live(tuple(inputs), _edges(tensors_of(value)))
        return value

    @torch.no_grad()
    def infer(self, inputs: Sequence[Tensor], keywords: Mapping[str, Tensor]) -> Value:
        """Run the pieces on one microbatch of any number of rows, and keep nothing."""
        self.shards.wait()
        value: Value = tuple(inputs)
        for piece, names in zip(self.shards.pieces, self._names, strict=True):
            value = piece(*self._cast(tensors_of(value)), **self._chosen(keywords, names))
        return value if self.leaving is None else self._cast_leaving(value)

    def set_output(self, microbatch: int, output: Tensor) -> None:
        """Replace the tensor from which the backward starts: in the last stage by the loss."""
        self._live[microbatch].outputs = _edges([output])

    def backward(
        self, microbatch: int, gradients: Sequence[Tensor] | None, *, split: bool = False
    ) -> list[Tensor | None]:
        """The gradients of the chunk's inputs of real or complex numbers, None for one on which the
        output does not depend; frees the microbatch's graph.

        ``gradients`` are those of its outputs of such numbers, or None if the output is the loss.
        ``split``: linear layers delay their weight gradients until ``backward_weight``. The first
        stage's inputs are the batch and have no gradients.
        """
        self.shards.wait()
        live = self._live.pop(microbatch)
        found = gradients if gradients is not None else [None] * len(live.outputs)
        pairs = [(o, g) for o, g in zip(live.outputs, found, strict=True) if o is not None]
        if pairs:
            self.shards.make_gradients(deferred=not split)
            if split:
                self.store.begin(microbatch)
            with backward_of_chunk():
                torch.autograd.backward([edge for edge, _ in pairs], [grad for _, grad in pairs])
            self.store.end()
        if self.arriving is None:
            return []
        return [x.grad for x in live.inputs if may_have_gradient(x.dtype)]

    def or_zeros(self, gradients: Sequence[Tensor | None]) -> list[Tensor]:
        """Gradients of the inputs, with zeros in the place of None."""
        shapes = [shape for shape in self.arriving or () if shape.has_gradient]
        device = self.shards.device
        return [
            torch.zeros(shape.size, dtype=shape.dtype, device=device) if found is None else found
            for found, shape in zip(gradients, shapes, strict=True)
        ]

    def backward_weight(self, microbatch: int) -> None:
        """Compute the weight gradients that ``backward`` has delayed; no gathered parameters are
        needed."""
        self.shards.make_gradients(deferred=True)
        self.store.run(microbatch)

    def _run(
        self, inputs: Sequence[Tensor], microbatch: int, keywords: Mapping[str, Tensor]
    ) -> Value:
        value: Value = tuple(inputs)
        options = self._options
        for index, piece in enumerate(self.shards.pieces):
            if options.seed is not None:
                options.seed(index, microbatch)
            value = run_recomputed(
                partial(piece, **self._chosen(keywords, self._names[index])),
                *self._cast(tensors_of(value)),
                recompute=options.recompute if id(piece) in self._recomputed else "none",
                random=options.random,
            )
        return value

    def _cast(self, values: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return cast(values, self._options.compute)

    def _chosen(self, keywords: Mapping[str, Tensor], names: frozenset[str]) -> dict[str, Tensor]:
        """Keyword inputs of a piece, in the type that it computes in."""
        mine = chosen(keywords, names)
        return dict(zip(mine, self._cast(list(mine.values())), strict=True))

    def _cast_leaving(self, value: Value) -> tuple[Tensor, ...]:
        """Outputs in the types in which the next stage receives them."""
        assert self.leaving is not None
        return tuple(
            self.shards.outlasting(x.to(shape.dtype))
            for x, shape in zip(tensors_of(value), self.leaving, strict=True)
        )

    def _check_leaving(self, found: Sequence[Tensor]) -> None:
        assert self.leaving is not None
        ours = [tuple(x.shape) for x in found]
        theirs = [tuple(shape.size) for shape in self.leaving]
        if ours != theirs:
            raise RuntimeError(
                f"a stage returns tensors of shapes {ours}, but the next one expects {theirs}: "
                "shapes may depend neither on values nor on the step"
            )


class _Alias(torch.autograd.Function):
    """The same values in the same memory. It is no leaf and no view, so a layer may work on it in
    place; as it shares the version counter, torch still notices where that was not allowed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        del ctx
        return x.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        del ctx
        return gradient


def _edges(outputs: Sequence[Tensor]) -> list[GradientEdge | None]:
    return [
        get_gradient_edge(output) if output.requires_grad else None
        for output in outputs
        if may_have_gradient(output.dtype)
    ]
