"""What can be set of FSDP2 without a pipeline. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from zeropp.literals import Auto, Recompute, ReduceEvery
from zeropp.ranges import AT_LEAST_1


@dataclass(frozen=True)
class FSDPKnobs:
    """``auto`` is chosen by the tuner; where the cluster has no prices, by a simple rule."""

    name: Literal["fsdp"] = "fsdp"
    shard: Annotated[int | Auto, AT_LEAST_1] = "auto"  # ranks of a ZeRO-3 group
    replicate: Annotated[int | Auto, AT_LEAST_1] = "auto"  # data-parallel copies of the groups
    recompute: Recompute | Auto = "auto"
    recompute_blocks: Annotated[int | Auto, AT_LEAST_1] = "auto"  # of the model, its first ones
    reduce_every: ReduceEvery | Auto = "auto"  # unit: after every microbatch; step: once
    compile: bool = False  # torch.compile each block

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012
