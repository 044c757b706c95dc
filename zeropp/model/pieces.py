"""The model as a list of pieces: embedding, blocks, head.

Piece ``i`` is initialised from ``(seed, i)`` alone. So a rank can build only its own pieces, and
gets the parameters that a single process would give them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zeropp.literals import BlockHalf
from zeropp.model.blocks import Block, make_norm
from zeropp.shape import ModelShape

_STD = ContextVar("standard deviation of initial weights", default=0.02)  # GPT-2's


@contextmanager
def initial_std(std: float) -> Iterator[None]:
    """Inside this context, pieces are initialised with standard deviation ``std`` instead of 0.02.

    Tests of gradients need it: at 0.02 the attention scores of a narrow model are nearly equal, and
    the gradients of queries and keys are so small that rounding hides them.
    """
    token = _STD.set(std)
    try:
        yield
    finally:
        _STD.reset(token)


class Embedding(nn.Module):
    """Token embedding; GPT adds learned positions."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.positions = nn.Embedding(shape.seq, shape.hidden) if shape.family == "gpt" else None

    def forward(self, tokens: Tensor) -> Tensor:
        """int64 [batch, seq] -> [batch, seq, hidden]."""
        x: Tensor = self.tokens(tokens)
        if self.positions is None:
            return x
        return x + self.positions(torch.arange(tokens.shape[1], device=tokens.device))  # type: ignore[no-any-return]


class Head(nn.Module):
    """Final norm and projection to the vocabulary."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.norm = make_norm(shape)
        self.output = nn.Linear(shape.hidden, shape.vocab, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, seq, hidden] -> logits [batch, seq, vocab]."""
        return self.output(self.norm(x))  # type: ignore[no-any-return]


def build_piece(
    shape: ModelShape, index: int, seed: int, device: torch.device | str = "cpu"
) -> nn.Module:
    """Build piece ``index``: 0 is the embedding, the last is the head, all others are blocks.

    Initial weights are normal with standard deviation 0.02 (see ``initial_std``), scaled by
    1/sqrt(2*layers) in projections whose output is added to the residual, as in GPT-2. On the meta
    device nothing is initialised. Raises IndexError if there is no such piece.
    """
    if not 0 <= index < shape.num_pieces:
        raise IndexError(f"piece {index}: {shape.name} has pieces 0 .. {shape.num_pieces - 1}")
    kind = Embedding if index == 0 else Head if index == shape.num_pieces - 1 else Block
    with torch.device("meta"):
        piece = kind(shape)
    if torch.device(device).type == "meta":
        return piece
    _allocate(piece, device)
    _initialise(piece, shape, seed * 100_003 + index)
    return piece


def build_half(
    shape: ModelShape,
    index: int,
    half: BlockHalf,
    *,
    seed: int,
    device: torch.device | str = "cpu",
) -> nn.Module:
    """Half of block ``index``, with the parameters that ``build_piece`` gives the whole block.

    The whole block is drawn first, so that no number depends on where the model is cut.
    """
    block = build_piece(shape, index, seed, device)
    assert isinstance(block, Block)
    return block.branch(half)


def build_model(shape: ModelShape, seed: int, device: torch.device | str = "cpu") -> nn.Sequential:
    """The whole model on one device; parameter names are ``{piece}.{parameter}``.

    With tied embeddings the head's ``output.weight`` *is* the embedding's ``tokens.weight``.
    """
    model = nn.Sequential(*(build_piece(shape, i, seed, device) for i in range(shape.num_pieces)))
    if shape.tied_embeddings:
        model[-1].output.weight = model[0].tokens.weight  # type: ignore[union-attr]
    return model


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean loss in nats per token, in fp32. ``logits``: [batch, seq, vocab]; ``targets``: int64
    [batch, seq]."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def _allocate(piece: nn.Module, device: torch.device | str) -> None:
    """Replace a piece's meta parameters by empty ones on ``device``. (``Module.to_empty`` does not
    work with fake tensors, which a trace uses.)"""
    for module in piece.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(torch.empty_like(parameter, device=device))


@torch.no_grad()
def _initialise(piece: nn.Module, shape: ModelShape, seed: int) -> None:
    device = next(piece.parameters()).device
    generator = torch.Generator(device=device).manual_seed(seed)
    residual_scale = (2 * shape.layers) ** -0.5
    for name, module in piece.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            residual = name in ("attention.output", "mlp.down")
            std = _STD.get() * (residual_scale if residual else 1.0)
            module.weight.normal_(0.0, std, generator=generator)
            if isinstance(module, nn.Linear) and module.bias is not None:
                module.bias.zero_()
        elif isinstance(module, nn.LayerNorm | nn.RMSNorm):
            module.reset_parameters()
