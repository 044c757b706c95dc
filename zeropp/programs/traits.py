"""The traits of a training program that change the time or memory of a plan.

A *program* is one version of a piece of training software (Megatron-LM of 2021, DeepSpeed 0.19,
ZeroPP). Its traits are sizes and flags. The cost model reads these alone, and never the name.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Literal

from zeropp.literals import Precision

# What selective recomputation runs again. "scores": the scores of unfused attention (arXiv
# 2205.05198, section 5). "elementwise": everything but the outputs of matrix products and of
# attention (``zeropp/engine/chunk.py``). "half": every second product or every second block
# (``selective_ac_option`` of torchtitan, ``selective_checkpointing`` of fms-fsdp).
Selective = Literal["scores", "elementwise", "half"]
# How ranks get the parameters that the others have updated under ZeRO-1. "gather": one all-gather.
# "broadcasts": a broadcast per rank, one after the other. "slices": an all-gather into a buffer,
# from which one kernel per rank and tensor copies that rank's slice of the tensor.
Updated = Literal["gather", "broadcasts", "slices"]
# The loss, where it is not fused. "in_place": Megatron's, whose gradient overwrites the logits.
# "torch": torch's own cross-entropy, with its temporaries. "in_place_under_tp": one like Megatron's
# with tensor parallelism, and torch's own without.
LossGradient = Literal["in_place", "in_place_under_tp", "torch"]
# What a program divides evenly among pipeline stages. "pieces": blocks, where embedding and head
# count as one block each if the number of blocks does not divide. "blocks": blocks alone.
# "modules": embedding, blocks, final norm and head, of which the first stages get the remainder.
# "flops": FLOPs. "cost": the time that pieces take on the cluster.
Spread = Literal["pieces", "blocks", "modules", "flops", "cost"]


@dataclass(frozen=True)
class StateBytes:
    """Bytes per parameter that a program keeps and sends at one precision, without any ZeRO."""

    parameters: int  # kept; with ZeRO-3 this is the copy that is sharded
    gradients: int  # kept
    optimizer: int  # Adam's moments, and fp32 master weights unless the parameters are fp32
    _: KW_ONLY
    half_gradients: int = 0  # kept 16-bit gradients in addition to ``gradients``
    reduced: int = 4  # sent by gradient reductions, over the replicas and the ZeRO-3 group
    casts_parameters: bool = False  # compute uses 16-bit copies of fp32 parameters
    zero1_all_reduces: bool = False  # ZeRO-1 all-reduces all gradients, instead of reduce-scatter


@dataclass(frozen=True, kw_only=True)
class Program:
    """One training program. The default of a trait is what most programs do; the registry has a
    source for every other value."""

    name: str
    bf16: StateBytes  # and fp16
    fp32: StateBytes

    # Kernels.
    flash: bool = True  # attention is one kernel, and its scores are never in memory
    dropout_masks: bool = False  # dropout is on: masks are written, read and kept
    fused_loss: bool = False  # 16-bit logits only, without an fp32 copy (flash-attention's loss)
    # Tensor parallelism splits the loss; False: each rank gathers all logits for the whole loss.
    vocab_parallel: bool = True
    # The vocabulary is padded to a multiple of 128 without tensor parallelism, too.
    pads_vocabulary: bool = False
    fused_accumulation: bool = True  # the product that makes a weight gradient adds it to the sum
    fused_rotary: bool = True  # rotary embedding copies no heads and keeps no sines and cosines
    loss_gradient: LossGradient = "in_place"
    selective: Selective = "scores"
    attention_factor: float = 1.0  # its fused attention's rate / the device's (FlashAttention-2)
    traffic_factor: float = 1.0  # its element-wise bytes / those of kernels fused per layer
    launch_factor: float = 1.0  # its host time per kernel / the device's ``launch_us``
    step_host_s: float = 0.0  # fixed host time per step: data, logging, clipping

    # Communication.
    split_boundary: bool = False  # a TP rank sends a slice of the stage output; arXiv 2104.04473
    blocking_transfers: bool = False  # sender and receiver compute nothing during a transfer
    # A gated MLP's two input products are two layers. Without sequence parallelism, each of them
    # all-reduces its input gradient over the TP ranks.
    split_gate: bool = False
    overlap_tensor: bool = False  # with sequence parallelism, TP collectives overlap the products
    overlap_reduction: bool = False  # gradient reductions overlap the last backward
    overlap_updated: bool = False  # ZeRO-1's parameter gathers overlap the next forward
    updated: Updated = "gather"
    zero1_group: int = 0  # replicas of a ZeRO-1 group; 0: all of them
    zero3: bool = False  # its ZeRO-3 can be priced: the gathers of each piece overlap compute
    shard_copies: bool = False  # ZeRO-3 copies between parameters and the collectives' buffers
    post_validation: bool = False  # a rank updates before it knows the others' gradient norms

    # Memory. ``stage_memory.py``, ``state_memory.py`` and ``activations.py`` in ``zeropp/cost``
    # say what each trait costs.
    resident_gradients: bool = True  # always held; False: only from a step's first reduction on
    keeps_gathered_inputs: bool = False  # sequence parallelism keeps products' gathered inputs
    # FSDP2's ``fully_shard`` is applied to every piece, even where the group is one rank.
    fsdp_hooks: bool = False
    # The whole model is one FSDP2 root. Then two pieces' parameters are gathered at any time, each
    # just before its use; gradients are reduced per microbatch; and tied embeddings are one
    # parameter, which belongs to the root.
    fsdp_root: bool = False
    # The gradients of a model chunk are summed in one flat buffer, which is allocated at the
    # chunk's first backward after a reduction and freed by the next reduction, which reads it.
    flat_chunks: bool = False
    # The stages are those of torch.distributed.pipelining: there are buffers for all messages of a
    # step, stage outputs are kept, and a split backward frees no saved tensor early.
    torch_stages: bool = False
    whole_embedding_gradient: bool = False  # each TP rank makes that of the whole vocabulary
    # As in DeepSpeed's ``PipelineEngine``: two permanent receive buffers, out of which messages are
    # copied; stage outputs are kept; slices of a stage output are joined again; and the last stage
    # holds the logits of two microbatches.
    pipe_buffers: bool = False
    flattens_gradients: bool = False  # gradients are copied into one tensor to be reduced

    # Defaults of the program.
    spread: Spread = "pieces"
    expandable_segments: bool = False  # the allocator setting; it leaves no fragmented memory

    def __hash__(self) -> int:
        """The hash of the name alone, because a search needs it millions of times. Equality still
        compares all fields."""
        return hash(self.name)

    def loss_in_place(self, tp: int) -> bool:
        """Whether the loss is Megatron's, with so many tensor-parallel ranks."""
        return self.loss_gradient == "in_place" or (
            self.loss_gradient == "in_place_under_tp" and tp > 1
        )

    def state(self, precision: Precision) -> StateBytes:
        """The bytes per parameter at a precision."""
        return self.bf16 if precision == "bf16" else self.fp32
