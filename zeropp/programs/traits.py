"""What a training program has, overlaps, copies and keeps, as far as it changes a plan's price.

A *program* is one version of a piece of training software (Megatron-LM of 2021, DeepSpeed 0.19,
ZeroPP). Sizes and flags only; the cost model reads nothing else of a program, least of all its
name. The entries are in the other files of this package, the registry in ``registry``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from zeropp.literals import Precision

# What selective recomputation runs again: the scores of unfused attention (arXiv 2205.05198,
# section 5); everything but the outputs of matrix products and of attention
# (``zeropp/engine/recompute.py``); or half of a block (every second product or every second block:
# ``selective_ac_option`` of torchtitan, ``selective_checkpointing`` of fms-fsdp).
Selective = Literal["scores", "elementwise", "half"]
# How ZeRO-1 hands the updated parameters on: one all-gather; one broadcast per rank's share, one
# after the other; or an all-gather into a buffer, out of which every rank's slice of every tensor
# is copied by a kernel of its own.
Updated = Literal["gather", "broadcasts", "slices"]
# What the gradient of the loss makes: it overwrites the logits; it does so under tensor parallelism
# alone; or the temporaries of torch's own cross-entropy.
LossGradient = Literal["in_place", "in_place_under_tp", "torch"]
# What a program spreads evenly over pipeline stages: blocks, where the embedding and the head count
# as one block each if the blocks do not divide; blocks alone; FLOPs; or the time that pieces take
# on the cluster.
Spread = Literal["pieces", "blocks", "flops", "cost"]


@dataclass(frozen=True)
class StateBytes:
    """Bytes per parameter that a program keeps and sends at one precision, before any ZeRO."""

    parameters: int  # resident; where ZeRO-3 shards the parameters, this is the sharded copy
    gradients: int  # resident
    optimizer: int  # Adam's moments, and master weights where they are not the parameters
    half_gradients: int = 0  # resident 16-bit gradients beside those above
    reduced: int = 4  # of a gradient on the wire, over the replicas and the ZeRO-3 group
    casts_parameters: bool = False  # compute uses 16-bit copies of fp32 parameters
    zero1_all_reduces: bool = False  # ZeRO-1 all-reduces gradients and then keeps its own part


@dataclass(frozen=True)
class Program:
    """One training program. A default is what most programs do; every other value has a source in
    the registry."""

    name: str
    bf16: StateBytes  # and fp16
    fp32: StateBytes

    # Kernels.
    flash: bool = True  # attention in one kernel, whose scores are never in memory
    dropout_masks: bool = False  # dropout is on: masks are written, read and kept
    fused_loss: bool = False  # keeps 16-bit logits alone, no fp32 copy (flash-attention's loss)
    vocab_parallel: bool = True  # under tensor parallelism the logits and their loss are split
    fused_accumulation: bool = True  # a weight gradient is added to its sum inside its product
    fused_rotary: bool = True  # rotary embedding copies no heads and keeps no sines and cosines
    loss_gradient: LossGradient = "in_place"
    selective: Selective = "scores"
    attention_factor: float = 1.0  # fused attention's rate over the device's (FlashAttention-2)
    traffic_factor: float = 1.0  # element-wise bytes over those of kernels fused per layer
    launch_factor: float = 1.0  # host time per kernel over the device's ``launch_us``
    step_host_s: float = 0.0  # fixed host work per step: data, logging, clipping

    # Communication.
    split_boundary: bool = False  # TP ranks send a slice of a boundary and gather it (SC21, 4.1)
    blocking_transfers: bool = False  # sender and receiver compute nothing during a transfer
    overlap_tensor: bool = False  # under sequence parallelism, TP collectives beside the products
    overlap_reduction: bool = False  # gradients are reduced beside the last backward
    overlap_updated: bool = False  # ZeRO-1's parameters are gathered beside the next forward
    updated: Updated = "gather"
    zero1_group: int = 0  # ZeRO-1 inside groups of this many replicas; 0: over all of them
    zero3: bool = False  # its ZeRO-3 is priced: gathers beside compute, piece by piece
    shard_copies: bool = False  # ZeRO-3 copies between parameters and the collectives' buffers
    post_validation: bool = False  # no rank waits for the others' gradients before it updates

    # Memory. What each of them costs is in ``zeropp/cost/stage_memory.py`` and ``activations.py``.
    resident_gradients: bool = True  # else a step's gradients begin with its first reduction
    keeps_gathered_inputs: bool = False  # sequence parallelism keeps whole inputs of products
    # FSDP2's ``fully_shard`` is on every piece, on a group of one rank, too.
    fsdp_hooks: bool = False
    # The model is one FSDP2 root: two pieces' parameters are gathered at a time, each when it is
    # used, gradients are reduced per microbatch, tied embeddings are one parameter of the root.
    fsdp_root: bool = False
    # Gradients are summed per model chunk in one flat buffer, which is there from the chunk's first
    # backward on and which the reduction reads, until the next reduction.
    flat_chunks: bool = False
    # The stages are those of torch.distributed.pipelining: buffers for all messages of a step,
    # outputs stay, and a split backward frees nothing that was saved.
    torch_stages: bool = False
    whole_embedding_gradient: bool = False  # every TP rank makes that of the whole vocabulary
    # Receives go into two lasting buffers and are copied out, outputs stay, slices of a boundary
    # are put together again, and the last stage holds two microbatches' logits.
    pipe_buffers: bool = False
    flattens_gradients: bool = False  # gradients are copied into one tensor to reduce them

    # What the program does where nothing else is said.
    spread: Spread = "pieces"
    expandable_segments: bool = False  # the allocator's setting: reserved memory has no fragments

    def __hash__(self) -> int:
        """Of the name alone: a search asks for it millions of times. Those of one name are still
        told apart by all their fields."""
        return hash(self.name)

    def state(self, precision: Precision) -> StateBytes:
        """Bytes per parameter at a precision."""
        return self.bf16 if precision == "bf16" else self.fp32
