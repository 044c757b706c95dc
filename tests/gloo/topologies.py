"""Random topologies for models of six layers and batches of eight rows."""

from __future__ import annotations

import random
from typing import Any

from zeropp.schedule.zeropp_order import smallest_cap

LAYERS, ROWS = 6, 8


def topology(seed: int) -> dict[str, Any]:
    """Random keywords of ``parallelize`` for at most eight ranks, and a random microbatch."""
    draw = random.Random(seed)
    pp, shard, replicate = draw.choice(
        [(p, s, r) for p in (1, 2, 3) for s in (1, 2, 4) for r in (1, 2) if 1 < p * s * r <= 8]
    )
    microbatch = draw.choice([1, 2] if shard * replicate < 8 else [1])
    count = ROWS // (microbatch * shard * replicate)
    chunks, unit = draw.randint(1, LAYERS // pp), draw.randint(1, count)
    least = smallest_cap(chunks, count, unit)
    return {
        "pp": pp,
        "shard": shard,
        "replicate": replicate,
        "chunks": chunks,
        "unit": unit,
        "microbatch": microbatch,
        "activation_cap": draw.randint(least, max(least, unit * chunks)),
        "prefetch": draw.randint(0, 2),
        "replicate_zero": draw.randint(0, 1) if replicate > 1 else 0,
        "placement": draw.choice(["dp_inner", "pp_inner"]),
        "recompute": draw.choice(["none", "selective", "full"]),
        "reduce_every": draw.choice(["unit", "step"]),
        "split_backward": draw.random() < 0.7,
        "tied": draw.random() < 0.5,
    }
