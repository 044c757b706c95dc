"""The settings of the public 3D programs. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from zeropp.literals import Auto, Placement, Recompute
from zeropp.ranges import AT_LEAST_1

Public3D = Literal["best_3d", "megatron_core", "megatron_deepspeed", "zero_bubble"]
Public3DSchedule = Literal["1f1b", "interleaved_1f1b", "zb_h1", "interleaved_zb", "zbv"]


@dataclass(frozen=True, kw_only=True)
class Public3DKnobs:
    """Settings of a public 3D program. A knob that is ``auto`` is chosen by the tuner, or by a
    simple rule where the cluster has no prices (CPUs)."""

    name: Public3D
    tp: Annotated[int | Auto, AT_LEAST_1] = "auto"  # tensor-parallel ranks
    pp: Annotated[int | Auto, AT_LEAST_1] = "auto"  # pipeline ranks
    replicate: Annotated[int | Auto, AT_LEAST_1] = "auto"  # data-parallel ranks
    replicate_zero: Literal[0, 1] | Auto = "auto"  # 1: distributed optimizer
    chunks: Annotated[int | Auto, AT_LEAST_1] = "auto"  # virtual stages per rank (V)
    schedule: Public3DSchedule | Auto = "auto"
    sequence_parallel: bool | Auto = "auto"
    recompute: Recompute | Auto = "auto"
    recompute_blocks: Annotated[int | Auto, AT_LEAST_1] = "auto"  # the first N of every stage
    placement: Placement | Auto = "auto"  # which ranks share a node
    split_blocks: bool | Auto = "auto"  # a stage may end inside a block; auto: where it is searched

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012


@dataclass(frozen=True)
class Best3DKnobs(Public3DKnobs):
    """Settings of the bound that has the best of all public parts."""

    name: Literal["best_3d"] = "best_3d"


@dataclass(frozen=True)
class MegatronCoreKnobs(Public3DKnobs):
    """Settings of Megatron-Core."""

    name: Literal["megatron_core"] = "megatron_core"


@dataclass(frozen=True)
class MegatronDeepSpeedKnobs(Public3DKnobs):
    """Settings of Megatron-DeepSpeed of 2022."""

    name: Literal["megatron_deepspeed"] = "megatron_deepspeed"


@dataclass(frozen=True)
class ZeroBubbleKnobs(Public3DKnobs):
    """Settings of the zero-bubble fork of Megatron-LM."""

    name: Literal["zero_bubble"] = "zero_bubble"
