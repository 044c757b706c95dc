"""Shape of a decoder-only transformer: numbers only, no parallelism and no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from zeropp.ranges import AT_LEAST_1, FROM_0_TO_1

Family = Literal["gpt", "llama"]


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a GPT (learned positions, LayerNorm, GELU) or Llama (RoPE, RMSNorm, SwiGLU).

    ``ffn`` is the width of the MLP's hidden layer; ``kv_heads`` < ``heads`` is grouped-query
    attention. GPT has biases, Llama has none.
    """

    name: str
    family: Family
    layers: Annotated[int, AT_LEAST_1]
    hidden: Annotated[int, AT_LEAST_1]
    heads: Annotated[int, AT_LEAST_1]
    kv_heads: Annotated[int, AT_LEAST_1]
    ffn: Annotated[int, AT_LEAST_1]
    vocab: Annotated[int, AT_LEAST_1]
    seq: Annotated[int, AT_LEAST_1]
    tied_embeddings: bool = False
    dropout: Annotated[float, FROM_0_TO_1] = 0.0

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden // self.heads

    @property
    def num_pieces(self) -> int:
        """Pipeline pieces: the embedding, ``layers`` blocks, the head (final norm, logits)."""
        return self.layers + 2

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012
