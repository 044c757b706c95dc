"""What each public 3D program can be set to, with the source. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from baselines.public_3d.knobs import Public3D, Public3DSchedule
from zeropp.literals import Placement, Recompute

_VIRTUAL_STAGES = (2, 3, 4, 6, 8, 12)


@dataclass(frozen=True, kw_only=True)
class Offer:
    """One program's choices. ``program`` is its name in ``zeropp.programs``, whose traits set the
    price; ``schedules`` gives the numbers of virtual stages per rank that each schedule may have.

    ``recomputed`` are the schedules with which activations can be recomputed, in the ways of
    ``recomputes``. ``interleaves_few``: interleaved schedules accept fewer microbatches than there
    are pipeline ranks. ``split_blocks``: a stage may end inside a block.
    """

    program: str
    schedules: Mapping[Public3DSchedule, tuple[int, ...]]
    recomputed: frozenset[Public3DSchedule]
    # Megatron's selective recomputation drops attention scores, which fused attention never keeps.
    recomputes: tuple[Recompute, ...] = ("none", "full")
    sequence_parallel: bool = True
    interleaves_few: bool = False
    split_blocks: bool = False
    placements: tuple[Placement, ...] = ("dp_inner", "pp_inner")


_MEGATRON_SCHEDULES: dict[Public3DSchedule, tuple[int, ...]] = {
    "1f1b": (1,),
    "interleaved_1f1b": _VIRTUAL_STAGES,
}

OFFERS: dict[Public3D, Offer] = {
    # megatron/core/pipeline_parallel/schedules.py (core_v0.12): 1F1B and interleaved 1F1B, no
    # split backward. Ranks are numbered tp-dp-pp, or tp-pp-dp with --use-tp-pp-dp-mapping.
    "megatron_core": Offer(
        program="megatron_core",
        schedules=_MEGATRON_SCHEDULES,
        recomputed=frozenset(_MEGATRON_SCHEDULES),
    ),
    # DeepSpeed's PipelineModule under Megatron's layers: plain 1F1B, no sequence parallelism.
    "megatron_deepspeed": Offer(
        program="megatron_deepspeed",
        schedules={"1f1b": (1,)},
        recomputed=frozenset({"1f1b"}),
        sequence_parallel=False,
        placements=("dp_inner",),
    ),
    # arXiv 2401.10241 and 2405.15362: ZB-H1 and ZB-V beside Megatron's own, all of them with
    # recomputation (megatron/core/tensor_parallel/random.py: CheckpointFunction runs in B).
    "zero_bubble": Offer(
        program="controllable_memory",
        schedules={**_MEGATRON_SCHEDULES, "zb_h1": (1,), "zbv": (2,)},
        recomputed=frozenset({*_MEGATRON_SCHEDULES, "zb_h1", "zbv"}),
        placements=("dp_inner",),
    ),
    # No existing program: the best of every public part at once.
    "best_3d": Offer(
        program="best_public_3d",
        schedules={
            **_MEGATRON_SCHEDULES,
            "zb_h1": (1,),
            "interleaved_zb": _VIRTUAL_STAGES,
            "zbv": (2,),
        },
        recomputed=frozenset({*_MEGATRON_SCHEDULES, "zb_h1", "interleaved_zb", "zbv"}),
        recomputes=("none", "selective", "full"),  # torch's selective checkpointing
        interleaves_few=True,  # torch/distributed/pipelining/schedules.py: one round of them
        split_blocks=True,  # torch's pipelining takes any module for a stage
    ),
}
