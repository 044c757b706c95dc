"""Megatron-Core's entries in the registry of contenders, which are two programs.

``megatron_core`` is NVIDIA's: layers, fused loss, overlap of tensor-parallel traffic and fused
accumulation of Transformer Engine and Apex, on GPUs. ``megatron_core_local`` has Megatron-Core's
own layers with torch's fused attention, and runs everywhere. CPUs have no Transformer Engine, so
that there both names run the second program. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from baselines.public_3d import SPACE, Public3DKnobs, SlicingKnobs, programs, size
from zeropp.choose.contender import Contender
from zeropp.choose.planner import one_order
from zeropp.engine.ranks.cuda_settings import CUDA_SETTINGS


@dataclass(frozen=True)
class MegatronCoreKnobs(SlicingKnobs):
    """Settings of Megatron-Core."""

    name: Literal["megatron_core"] = "megatron_core"


@dataclass(frozen=True)
class MegatronCoreLocalKnobs(Public3DKnobs):
    """Settings of Megatron-Core with its own layers."""

    name: Literal["megatron_core_local"] = "megatron_core_local"


MEGATRON_CORE = Contender(
    name="megatron_core",
    label="Megatron-Core",
    knobs=MegatronCoreKnobs,
    size=size,
    orders=one_order(programs),
    space=SPACE,
    search_effort=2,
    # Megatron-Core's default, and NVIDIA's example for H100 (--grad-reduce-in-bf16).
    gradient_types={"grad_accum_dtype": "bf16"},
    published_as=(
        *("megatron_lm_2021", "megatron_lm_2022", "megatron_core", "megatron_core_r0.6"),
        *("megatron_core_r0.8", "flagscale", "nemo_h100", "megatron_bridge"),
    ),
    runs_with={"context": 1, "offload_blocks": 0, "offload_modules": "none"},
    trainer="baselines.megatron_core.trainer:MegatronTrainer",
    emulation="baselines.megatron_core.emulated:stand_ins",
    extra=("megatron", "megatron"),
    # Its tensor-parallel collectives overlap products only in the order in which it starts both.
    environment=CUDA_SETTINGS | {"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
)
MEGATRON_CORE_LOCAL = replace(
    MEGATRON_CORE,
    name="megatron_core_local",
    label="Megatron-Core, own layers",
    knobs=MegatronCoreLocalKnobs,
    runs_with={},
    published_as=(),
    in_verdict=False,  # which compares NVIDIA's own, with Transformer Engine
)
