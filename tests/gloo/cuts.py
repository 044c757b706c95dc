"""The layers beside a pipeline's cuts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from zeropp.schedule.cuts import cut_layers
from zeropp.schedule.program import loop_placement

Make = Callable[[], nn.Module]


def beside_cuts(kinds: Sequence[Make], degrees: Mapping[str, Any]) -> set[tuple[Make, Make]]:
    """The layers right before and right behind each cut between stages, where all layers weigh the
    same; none without pipeline parallelism."""
    if degrees.get("pp", 1) == 1:
        return set()
    stage_rank = loop_placement(degrees["pp"], degrees.get("chunks", 1))
    cuts = cut_layers([1.0] * len(kinds), stage_rank)[1:-1]
    return {(kinds[cut - 1], kinds[cut]) for cut in cuts}
