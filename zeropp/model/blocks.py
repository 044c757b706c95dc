"""Transformer blocks for one device: GPT (LayerNorm, biases) and Llama (RMSNorm, RoPE).

The MLP is SwiGLU where ``ModelShape.gates`` is 2, and otherwise has GELU. Attention is
``scaled_dot_product_attention`` with a causal mask. Every projection is an ``nn.Linear`` of its
own, so that it can be sharded, or its weight gradient delayed, without a change to this file.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zeropp.literals import BlockHalf
from zeropp.shape import ModelShape


def rope_angles(head_dim: int, seq: int, device: torch.device, base: float = 10000.0) -> Tensor:
    """Rotation angles of RoPE (arXiv 2104.09864, eq. 15): float32 [seq, head_dim / 2]."""
    exponents = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
    positions = torch.arange(seq, device=device, dtype=torch.float32)
    return torch.outer(positions, base**-exponents)


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
        self.query = nn.Linear(shape.hidden, shape.hidden, bias=bias)
        self.key = nn.Linear(shape.hidden, kv_width, bias=bias)
        self.value = nn.Linear(shape.hidden, kv_width, bias=bias)
        self.output = nn.Linear(shape.hidden, shape.hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, seq, hidden] -> [batch, seq, hidden]."""
        batch, seq, _ = x.shape
        q, k, v = (
            projection(x).view(batch, seq, -1, self.head_dim).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        if self.rope:
            angles = rope_angles(self.head_dim, seq, x.device)
            q, k = rotate(q, angles), rotate(k, angles)
        grouped = q.shape[1] != k.shape[1]
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        return self.output(mixed.transpose(1, 2).reshape(batch, seq, -1))  # type: ignore[no-any-return]


class GeluMlp(nn.Module):
    """GPT's MLP, which is not gated: up-projection, GELU (tanh form), down-projection."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        bias = shape.family == "gpt"
        self.up = nn.Linear(shape.hidden, shape.ffn, bias=bias)
        self.down = nn.Linear(shape.ffn, shape.hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, seq, hidden] -> [batch, seq, hidden]."""
        return self.down(F.gelu(self.up(x), approximate="tanh"))  # type: ignore[no-any-return]


class SwigluMlp(nn.Module):
    """Llama's gated MLP: SiLU(gate) * up, then the down-projection."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        bias = shape.family == "gpt"
        self.gate = nn.Linear(shape.hidden, shape.ffn, bias=bias)
        self.up = nn.Linear(shape.hidden, shape.ffn, bias=bias)
        self.down = nn.Linear(shape.ffn, shape.hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, seq, hidden] -> [batch, seq, hidden]."""
        return self.down(F.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


def make_norm(shape: ModelShape) -> nn.Module:
    """LayerNorm for GPT, RMSNorm for Llama."""
    if shape.family == "gpt":
        return nn.LayerNorm(shape.hidden)
    return nn.RMSNorm(shape.hidden, eps=1e-5)


class Block(nn.Module):
    """Pre-norm residual block: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.attention_norm = make_norm(shape)
        self.attention = Attention(shape)
        self.mlp_norm = make_norm(shape)
        self.mlp = SwigluMlp(shape) if shape.gates == 2 else GeluMlp(shape)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, seq, hidden] -> [batch, seq, hidden]."""
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))  # type: ignore[no-any-return]

    def branch(self, half: BlockHalf) -> HalfBlock:
        """The attention or the MLP of this block, over the same parameters under the same names."""
        return HalfBlock(self, half)


class HalfBlock(nn.Module):
    """One of the two residual branches of a block: what one of two pipeline stages computes where
    the model is cut inside the block. Between them goes the residual stream alone."""

    def __init__(self, block: Block, half: BlockHalf) -> None:
        super().__init__()
        self.which = half
        for name, module in block.named_children():
            if name.startswith(half) or name == "dropout":
                self.add_module(name, module)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, seq, hidden] -> [batch, seq, hidden]."""
        norm, branch = self.get_submodule(f"{self.which}_norm"), self.get_submodule(self.which)
        return x + self.get_submodule("dropout")(branch(norm(x)))  # type: ignore[no-any-return]
