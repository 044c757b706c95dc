"""The settings of DeepSpeed's 3D parallelism. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from zeropp.literals import Auto
from zeropp.ranges import AT_LEAST_1


@dataclass(frozen=True, kw_only=True)
class DeepSpeedKnobs:
    """Settings of DeepSpeed 3D. A knob that is ``auto`` is chosen by the tuner, or by a simple rule
    where the cluster has no prices (CPUs)."""

    name: Literal["deepspeed_3d"] = "deepspeed_3d"
    tp: Annotated[int | Auto, AT_LEAST_1] = "auto"  # tensor-parallel ranks
    pp: Annotated[int | Auto, AT_LEAST_1] = "auto"  # pipeline ranks
    replicate: Annotated[int | Auto, AT_LEAST_1] = "auto"  # data-parallel ranks
    replicate_zero: Literal[0, 1] | Auto = "auto"  # ZeRO stage; a pipeline allows no higher one
    recompute: Literal["none", "full"] | Auto = "auto"

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012
