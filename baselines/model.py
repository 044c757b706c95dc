"""GPT and Llama for a single device, as lists of pieces: embedding, blocks, head.

In: a ``ModelShape`` and a seed. Out: ``nn.Module``s without any parallelism; contenders shard and
cut them from outside. Every projection is an ``nn.Linear`` of its own, so that it can be sharded,
or its weight gradient delayed, without a change to this file.

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

from zeropp.engine.loss import in_slices
from zeropp.types.shape import ModelShape


def rope_angles(head_dim: int, positions: Tensor, base: float = 10000.0) -> Tensor:
    """Rotation angles of RoPE (arXiv 2104.09864, eq. 15) at positions [batch or 1, seq]: float32
    [batch or 1, 1, seq, head_dim / 2]."""
    exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32)
    return positions[:, None, :, None] * base ** -(exponents / head_dim)


def _positions(x: Tensor) -> Tensor:
    """The positions [1, seq] of the tokens of rows [batch, seq, ...], where none are given."""
    return torch.arange(x.shape[1], device=x.device)[None]


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Apply RoPE to ``x`` [batch, heads, seq, head_dim], in fp32: element i of a head's first half
    and element i of its second half form the pair that is rotated."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention, which is grouped-query attention where ``kv_heads`` < ``heads``.

    ``forward`` reads the numbers of heads from the projections' widths, so that a module whose
    projections were cut to some of the heads computes those.
    """

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        bias = shape.family == "gpt"
        kv_width = shape.kv_heads * shape.head_dim
        self.head_dim = shape.head_dim
        self.rope = shape.family == "llama"
        self.query = nn.Linear(shape.hidden, shape.attended, bias=bias)
        self.key = nn.Linear(shape.hidden, kv_width, bias=bias)
        self.value = nn.Linear(shape.hidden, kv_width, bias=bias)
        self.output = nn.Linear(shape.attended, shape.hidden, bias=bias)

    def forward(self, x: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """[batch, seq, hidden] -> [batch, seq, hidden]."""
        batch, seq, _ = x.shape
        q, k, v = (
            projection(x).view(batch, seq, -1, self.head_dim).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        if self.rope:
            positions = _positions(x) if position_ids is None else position_ids
            angles = rope_angles(self.head_dim, positions)
            q, k = rotate(q, angles), rotate(k, angles)
        mixed = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
        )
        return self.output(mixed.transpose(1, 2).reshape(batch, seq, -1))  # type: ignore[no-any-return]


class Mlp(nn.Module):
    """Llama's gated MLP: SiLU(gate) * up, then the down-projection. Without a gate, as in GPT:
    up-projection, GELU (tanh form), down-projection."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        bias = shape.family == "gpt"
        self.gate = nn.Linear(shape.hidden, shape.ffn, bias=bias) if shape.gates == 2 else None
        self.up = nn.Linear(shape.hidden, shape.ffn, bias=bias)
        self.down = nn.Linear(shape.ffn, shape.hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, seq, hidden] -> [batch, seq, hidden]."""
        if self.gate is None:
            return self.down(F.gelu(self.up(x), approximate="tanh"))  # type: ignore[no-any-return]
        return self.down(F.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


def make_norm(shape: ModelShape) -> nn.Module:
    """LayerNorm for GPT, RMSNorm for Llama."""
    if shape.family == "gpt":
        return nn.LayerNorm(shape.hidden)
    return nn.RMSNorm(shape.hidden, eps=1e-5)


class Block(nn.Module):
    """Pre-norm residual block: x + attention(norm(x)), then x + mlp(norm(x))."""

    counts_from_zero = True  # which zeropp asks where sequences are divided

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.attention_norm = make_norm(shape)
        self.attention = Attention(shape)
        self.mlp_norm = make_norm(shape)
        self.mlp = Mlp(shape)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, x: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """[batch, seq, hidden] -> [batch, seq, hidden]; ``position_ids`` [batch, seq] are those of
        the tokens in their sequences, by default 0 to seq-1."""
        x = x + self.dropout(self.attention(self.attention_norm(x), position_ids=position_ids))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))  # type: ignore[no-any-return]


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

    counts_from_zero = True

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.positions = nn.Embedding(shape.seq, shape.hidden) if shape.family == "gpt" else None

    def forward(self, tokens: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """int64 [batch, seq] -> [batch, seq, hidden]; ``position_ids`` as in ``Block``."""
        x: Tensor = self.tokens(tokens)
        if self.positions is None:
            return x
        return x + self.positions(_positions(tokens) if position_ids is None else position_ids)  # type: ignore[no-any-return]


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
    # ``Module.to_empty`` does not work with fake tensors, which a trace uses.
    for module in piece.modules():
        for name, parameter in [*module.named_parameters(recurse=False)]:
            setattr(module, name, nn.Parameter(torch.empty_like(parameter, device=device)))
    _initialise(piece, shape, seed * 100_003 + index)
    return piece


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


def sliced_cross_entropy(logits: Tensor, targets: Tensor, tokens: int = 0) -> Tensor:
    """The same, with no more than a slice of the tokens in fp32 at a time; or, where these are a
    part of ``tokens`` tokens, their part of the mean over all."""
    total = in_slices(
        lambda part, own: F.cross_entropy(part.float(), own, reduction="sum"),
        logits.flatten(0, 1),
        targets.flatten(),
    )
    return total / (tokens or targets.numel())


@torch.no_grad()
def _initialise(piece: nn.Module, shape: ModelShape, seed: int) -> None:
    generator = torch.Generator(device=next(piece.parameters()).device).manual_seed(seed)
    for name, module in piece.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            residual = name in ("attention.output", "mlp.down")
            std = _STD.get() * ((2 * shape.layers) ** -0.5 if residual else 1.0)
            module.weight.normal_(0.0, std, generator=generator)
            if isinstance(module, nn.Linear) and module.bias is not None:
                module.bias.zero_()
        elif isinstance(module, nn.LayerNorm | nn.RMSNorm):
            module.reset_parameters()


__all__ = ["build_model", "build_piece", "cross_entropy", "initial_std", "sliced_cross_entropy"]
