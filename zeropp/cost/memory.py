"""Bytes of one stage on one rank: parameters, gradients, optimizer, activations.

Activations follow arXiv 2205.05198 (eq. 1 to 4) with the saved tensors listed one by one, for
fused attention too. Parameters, gradients and optimizer follow arXiv 1910.02054 (section 3.1)
with the bytes that the program keeps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zeropp.cost.blocks import Work
from zeropp.cost.flops import piece_parameters
from zeropp.cost.kernels import element_bytes
from zeropp.cost.price import StageMemory
from zeropp.cost.software import Software
from zeropp.layout import Layout

if TYPE_CHECKING:
    from zeropp.plan import Plan


def block_activations(work: Work) -> float:
    """What a block keeps of one microbatch from its forward to its backward, recomputation aside.

    In units of tokens x hidden: the inputs of both norms and of both residual adds' dropouts are
    split over TP by sequence parallelism alone; everything between is split by TP.
    """
    shape, software = work.shape, work.software
    e, h, kv = element_bytes(work.precision), shape.hidden, shape.kv_heads * shape.head_dim
    norms = 4 * h * e  # input and output of both norms
    if work.software.dropout_masks:
        norms += 2 * h
    mlp = 2 if shape.family == "gpt" else 4
    inner = (h + 2 * kv) * e + 2 * h * e + mlp * shape.ffn * e
    if software.flash:
        inner += 4 * shape.heads
    elif work.recompute != "selective":
        inner += shape.heads * shape.seq * (2 * e + 1 if software.dropout_masks else e)
    return work.tokens * (norms / sequence_split(work) + inner / work.tp)


def block_deferred(work: Work) -> float:
    """x and dY of every linear layer of a block, one microbatch."""
    shape, e = work.shape, element_bytes(work.precision)
    h, kv = shape.hidden, shape.kv_heads * shape.head_dim
    gates = 1 if shape.family == "gpt" else 2
    inputs = 2 * h / sequence_split(work) + (h + shape.ffn) / work.tp
    outputs = (h + 2 * kv + gates * shape.ffn) / work.tp + 2 * h
    return work.tokens * e * (inputs + outputs)


def sequence_split(work: Work) -> int:
    """Ranks over which sequence parallelism splits what TP leaves whole."""
    return work.tp if work.sequence_parallel else 1


def stage_memory(plan: Plan, work: Work, stage: int) -> StageMemory:
    """Bytes of one stage on one of its ranks."""
    layout, software = plan.layout, work.software
    pieces = plan.pieces_of(stage)
    parameters = sum(piece_parameters(plan.shape, i) for i in pieces) / layout.tp
    blocks = sum(1 for i in pieces if 0 < i < plan.shape.num_pieces - 1)
    e, state = element_bytes(plan.precision), optimizer_shards(layout, software)
    boundary = work.tokens * plan.shape.hidden * e / sequence_split(work)
    kept = block_activations(work) if plan.recompute != "full" else boundary
    return StageMemory(
        parameters=int(parameters * software.parameter_bytes / layout.shard),
        optimizer=int(parameters * software.optimizer_bytes / state),
        gradients=int(parameters * software.gradient_bytes / _gradient_shards(plan)),
        unsharded=int(parameters * e) if plan.gathers else 0,
        unsharded_gradients=int(parameters * 4) if plan.gathers else 0,
        activations=int(blocks * kept),
        deferred=int(blocks * block_deferred(work)),
    )


def _gradient_shards(plan: Plan) -> int:
    """Ranks over which the gradients of a step are split: those that cross the replicas once a
    unit under ZeRO-1 add up where they are updated."""
    layout = plan.layout
    rows = layout.replicate_zero and plan.replicate_every == "unit"
    return layout.shard * (layout.replicate if rows else 1)


def optimizer_shards(layout: Layout, software: Software) -> int:
    """Ranks over which the optimizer state is split."""
    return layout.shard * zero1_ranks(layout, software)


def zero1_ranks(layout: Layout, software: Software) -> int:
    """Replicas over which ZeRO-1 splits the optimizer state; 1 where there is no ZeRO-1."""
    if software.zero1_group:
        return min(software.zero1_group, layout.replicate)
    return layout.replicate if layout.replicate_zero else 1


def workspace_bytes(plan: Plan, work: Work, pipeline_rank: int) -> int:
    """Temporaries at a rank's peak: logits and their fp32 copies where the head is, a block's
    recomputed activations, and the gradient of the widest tensor."""
    shape, e = plan.shape, element_bytes(plan.precision)
    stages = plan.schedule.stages_of(pipeline_rank)
    head = any(shape.num_pieces - 1 in plan.pieces_of(stage) for stage in stages)
    vocab = shape.vocab / (plan.layout.tp if work.software.vocab_parallel else 1)
    logits = work.tokens * vocab * (e + 4 + 4) if head else 0.0
    again = block_activations(work) if plan.recompute == "full" else 0.0
    gradient = 2 * work.tokens * max(shape.ffn / plan.layout.tp, shape.hidden) * e
    return int(max(logits, again + gradient))
