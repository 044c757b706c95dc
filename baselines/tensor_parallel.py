"""What any tensor parallelism needs of a shape: degrees that divide what is cut. No torch."""

from __future__ import annotations

from zeropp.layout import InfeasibleError, Layout, divisors
from zeropp.shape import ModelShape


def check_tensor_parallel(shape: ModelShape, layout: Layout) -> None:
    """Refuse a tensor-parallel degree that does not divide what it cuts."""
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
