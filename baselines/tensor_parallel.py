"""The check that a tensor-parallel degree divides everything that it cuts. Imports no torch."""

from __future__ import annotations

from zeropp.types.layout import InfeasibleError, Layout, divisors
from zeropp.types.shape import ModelShape


def check_tensor_parallel(shape: ModelShape, layout: Layout) -> None:
    """Raise InfeasibleError unless ``layout.tp`` divides the heads, the key/value heads, the MLP's
    width, the vocabulary and, with sequence parallelism, the sequence length."""
    cut = {"heads": shape.heads, "kv_heads": shape.kv_heads, "ffn": shape.ffn, "vocab": shape.vocab}
    if layout.sequence_parallel:
        cut["seq"] = shape.seq
    for field, size in cut.items():
        if size % layout.tp:
            fits = [d for d in divisors(shape.kv_heads) if not any(n % d for n in cut.values())]
            raise InfeasibleError(
                f"contender.tp={layout.tp}: must divide model.{field}={size} "
                f"(try {', '.join(map(str, fits))})"
            )
