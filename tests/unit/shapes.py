"""Models that tests make up."""

from zeropp.types.shape import ModelShape


def gpt(layers: int, hidden: int, heads: int, vocab: int = 51200, seq: int = 2048) -> ModelShape:
    """A GPT with an MLP of four times its width."""
    return ModelShape(
        name="gpt", family="gpt", layers=layers, hidden=hidden, heads=heads, kv_heads=heads,
        ffn=4 * hidden, vocab=vocab, seq=seq,
    )  # fmt: skip
