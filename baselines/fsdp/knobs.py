"""The settings of FSDP2 without a pipeline. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from zeropp.literals import Auto, Recompute, ReduceEvery
from zeropp.ranges import AT_LEAST_1


@dataclass(frozen=True, kw_only=True)
class FSDPKnobs:
    """Settings of FSDP2. A knob that is ``auto`` is chosen by the tuner, or by a simple rule where
    the cluster has no prices (CPUs)."""

    name: Literal["fsdp"] = "fsdp"
    shard: Annotated[int | Auto, AT_LEAST_1] = "auto"  # ranks of a ZeRO-3 group (dp_shard)
    replicate: Annotated[int | Auto, AT_LEAST_1] = "auto"  # number of such groups (dp_replicate)
    recompute: Recompute | Auto = "auto"
    recompute_blocks: Annotated[int | Auto, AT_LEAST_1] = "auto"  # the model's first N
    reduce_every: ReduceEvery | Auto = "auto"  # unit: per microbatch; step: per step
    compile: bool = False  # torch.compile every block

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012
