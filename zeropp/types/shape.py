"""The sizes of a decoder-only transformer. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from zeropp.types.literals import AT_LEAST_0, FROM_0_TO_1, NUM_LAYERS, SIZE

Family = Literal["gpt", "llama"]


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a GPT (learned positions, LayerNorm, biases) or Llama (RoPE, RMSNorm, no biases).

    ``ffn`` is the width of the MLP's hidden layer. Fewer ``kv_heads`` than ``heads`` means
    grouped-query attention. ``gated_mlp`` is true for an MLP with three matrices, such as SwiGLU,
    and false for one with two, such as GELU or squared ReLU; None means true for Llama and false
    for GPT. ``document`` is the length of the documents that are packed into a sequence, at whose
    ends attention ends, in tokens: the sum of their squares over their sum. 0: attention does not
    end inside a sequence. Prices have documents; the suite's own ranks do not. ``head_width`` is
    that of one attention head; None: hidden / heads.
    """

    name: str
    family: Family
    layers: Annotated[int, NUM_LAYERS]
    hidden: Annotated[int, SIZE]
    heads: Annotated[int, SIZE]
    kv_heads: Annotated[int, SIZE]
    ffn: Annotated[int, SIZE]
    vocab: Annotated[int, SIZE]
    seq: Annotated[int, SIZE]
    tied_embeddings: bool = False
    dropout: Annotated[float, FROM_0_TO_1] = 0.0
    gated_mlp: bool | None = None
    document: Annotated[int, AT_LEAST_0] = 0
    head_width: Annotated[int, SIZE] | None = None

    def __hash__(self) -> int:
        """The hash of the name alone, because a search needs it millions of times. Equality still
        compares all fields."""
        return hash(self.name)

    @property
    def gates(self) -> int:
        """How many matrix products the MLP applies to its input: 2 if it is gated, else 1."""
        gated = self.family == "llama" if self.gated_mlp is None else self.gated_mlp
        return 2 if gated else 1

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.head_width or self.hidden // self.heads

    @property
    def attended(self) -> int:
        """Width of the queries of a token, and of what attention gives: that of all heads."""
        return self.heads * self.head_width if self.head_width else self.hidden

    @property
    def num_pieces(self) -> int:
        """Pipeline pieces: the embedding, ``layers`` blocks, the head (final norm, logits)."""
        return self.layers + 2

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012
