"""What can be set of the best public 3D parallelism. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from zeropp.literals import Auto, Placement
from zeropp.ranges import AT_LEAST_1

Best3DSchedule = Literal["1f1b", "interleaved_1f1b", "zb_h1", "interleaved_zb", "zbv"]


@dataclass(frozen=True)
class Best3DKnobs:
    """``auto`` is chosen by the tuner; where the cluster has no prices, by a simple rule."""

    name: Literal["best_3d"] = "best_3d"
    tp: Annotated[int | Auto, AT_LEAST_1] = "auto"  # tensor-parallel ranks
    pp: Annotated[int | Auto, AT_LEAST_1] = "auto"  # pipeline ranks
    replicate: Annotated[int | Auto, AT_LEAST_1] = "auto"  # data-parallel ranks
    replicate_zero: Literal[0, 1] | Auto = "auto"  # 1: distributed optimizer
    chunks: Annotated[int | Auto, AT_LEAST_1] = "auto"  # model chunks per rank (V)
    schedule: Best3DSchedule | Auto = "auto"
    sequence_parallel: bool | Auto = "auto"
    recompute: Literal["none", "full"] | Auto = "auto"
    recompute_blocks: Annotated[int | Auto, AT_LEAST_1] = "auto"  # per stage, its first ones
    placement: Placement | Auto = "auto"  # which ranks share a node

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012
