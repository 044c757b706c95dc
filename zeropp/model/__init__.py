"""GPT and Llama for a single device, as lists of pieces: embedding, blocks, head.

In: a ``ModelShape`` and a seed. Out: ``nn.Module``s without any parallelism; contenders shard and
cut them from outside. Read ``blocks`` (a transformer block), then ``pieces`` (the list).
"""

from zeropp.model.pieces import build_half, build_model, build_piece, cross_entropy, initial_std

__all__ = ["build_half", "build_model", "build_piece", "cross_entropy", "initial_std"]
