"""How a training program is written, as far as it changes a plan's price; sizes only.

A plan names the runtime that it is for, and ``software_of`` says what that one does. Published
measurements were made with other programs; what they do is stated there, by rule, and handed to
``price_plan``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from zeropp.plan import Plan


Program = Literal["megatron", "zeropp", "fsdp", "torch_pp", "deepspeed"]
# What selective recomputation makes again: unfused attention's scores (arXiv 2205.05198, section
# 5); all but the outputs of products and attention (``zeropp/engine/recompute.py``); or half of a
# block (every second product or block: torchtitan's ``selective_ac_option``, fms-fsdp's
# ``selective_checkpointing``).
Selective = Literal["scores", "elementwise", "half"]
# How ZeRO-1 hands updated parameters on: one all-gather; a broadcast of every rank's share, one
# after the other; or an all-gather into a buffer, from which each rank's slice of each tensor is
# copied by itself.
Updated = Literal["gather", "broadcasts", "slices"]


@dataclass(frozen=True)
class Software:
    """What a program keeps and does. Bytes are a parameter, sharding aside."""

    parameter_bytes: int  # resident; where ZeRO-3 shards, this is the sharded copy
    gradient_bytes: int  # resident
    optimizer_bytes: int  # master weights (if they are not the parameters) and Adam's moments
    half_gradient_bytes: int = 0  # resident 16-bit gradients beside those above
    flash: bool = True  # attention in one kernel, scores never in memory
    dropout_masks: bool = False  # dropout is on: masks are written, read and kept
    fused_loss: bool = False  # keeps 16-bit logits alone, no fp32 copy (flash-attention's loss)
    vocab_parallel: bool = True  # under TP the logits and their loss are split
    split_boundary: bool = False  # TP ranks send a slice of a boundary and gather it (SC21, 4.1)
    blocking_transfers: bool = False  # both ends of a transfer stand still meanwhile
    overlap_tensor: bool = False  # tensor-parallel collectives beside products, slice by slice
    overlap_reduction: bool = False  # gradients reduced beside the last backward
    updated: Updated = "gather"
    overlap_updated: bool = False  # ZeRO-1's updated parameters gathered beside the next forward
    attention_factor: float = 1.0  # fused attention's rate over the device's (FlashAttention-2)
    traffic_factor: float = 1.0  # element-wise traffic over that of kernels fused per layer
    launch_factor: float = 1.0  # host time of this program over the device's ``launch_us``
    step_host_s: float = 0.0  # a step's fixed host work: data, logging, clipping
    reduce_bytes: int = 4  # of a gradient on the wire, over the replicas
    zero1_group: int = 0  # ZeRO-1 inside groups of this many replicas; 0: over all, if at all
    fused_accumulation: bool = True  # dW adds into the gradient buffer inside its product
    shard_copies: bool = False  # ZeRO-3 copies between parameters and the collectives' buffers
    program: Program = "megatron"  # whose habits of keeping memory; see ``memory.py``
    post_validation: bool = False  # no rank waits for the others' gradients before it updates
    selective: Selective = "scores"
    zero1_all_reduces: bool = False  # ZeRO-1 that all-reduces gradients and then keeps its part


_FSDP2_PROGRAMS: dict[str, Program] = {"fsdp": "fsdp", "torch_pp": "torch_pp"}


def software_of(plan: Plan) -> Software:
    """The program of a plan, by its runtime; raises ValueError on a published measurement's,
    which its caller knows.

    fp32: one copy of everything. bf16 under FSDP2: fp32 shards are the masters, gradients are
    reduced and kept in fp32; parameters are copied out of the gathered buffer and gradients into
    the reduced one (``_fsdp_collectives.py``: ``foreach_all_gather_copy_out``, ``chunk_cat``).
    DeepSpeed's bf16 optimizer: bf16 parameters, fp32 accumulated gradients, bf16 ones that are
    zeroed and not freed, fp32 masters (``runtime/bf16_optimizer.py``); its ZeRO-1 all-reduces
    gradients, cast to bf16 (``PipelineEngine._bf16_reduce_grads``, ``communication_data_type``);
    its pipeline engine slices boundaries over TP ranks (``pipe_partitioned``) and its transfers
    stand in line with compute (``runtime/pipe/p2p.py``).
    Megatron Core, for "3D, best known", has all that it publishes: the distributed optimizer,
    fused gradient accumulation, reductions beside the backward and parameter gathers beside the
    next forward, sliced boundaries, and tensor-parallel collectives sliced beside products, for
    which it needs sequence parallelism.
    """
    bf16 = plan.precision == "bf16"
    if plan.runtime == "megatron_core":
        return Software(
            *((2, 4, 12) if bf16 else (4, 4, 8)),
            split_boundary=True,
            overlap_tensor=plan.layout.sequence_parallel,
            overlap_reduction=True,
            overlap_updated=True,
        )
    if plan.runtime == "deepspeed":
        return Software(
            *((2, 4, 12, 2) if bf16 else (4, 4, 8, 0)),
            split_boundary=True,
            blocking_transfers=True,
            zero1_all_reduces=bf16,
            reduce_bytes=2 if bf16 else 4,
            fused_accumulation=False,
            program="deepspeed",
        )
    if plan.runtime == "fsdp2":
        program = _FSDP2_PROGRAMS.get(plan.contender, "zeropp")
        return Software(
            *(4, 4, 8),
            fused_accumulation=False,
            shard_copies=True,
            program=program,
            selective="elementwise",
        )
    raise ValueError(f"runtime={plan.runtime!r}: its software must be given to price_plan")
