"""Bytes of one stage on one rank: parameters, gradients, optimizer, activations, temporaries.

Activations follow arXiv 2205.05198 (eq. 1 to 4) with the saved tensors listed one by one, for
fused attention and Llama, too. Parameters, gradients and optimizer follow arXiv 1910.02054 (section
3.1) with the bytes that the program keeps. What the contenders of plain torch keep and make
besides was read off traces (``zeropp.engine.trace``), which a test holds to these formulas.
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

_FP32 = 4
_MLP_SAVED = {"gpt": 2, "llama": 4}  # GELU and product; gate, its SiLU, up and their product
_MLP_GATES = {"gpt": 1, "llama": 2}


def block_saved(work: Work) -> float:
    """What a block's backward needs of one microbatch's forward.

    In units of tokens x hidden: the inputs of both norms and the masks of both residual adds'
    dropouts are split over TP by sequence parallelism alone, and so are the inputs of the products
    where a program gathers them again for backward; everything between is split by TP.
    """
    shape, software = work.shape, work.software
    e, h, kv = element_bytes(work.precision), shape.hidden, shape.kv_heads * shape.head_dim
    norms, masks = 2 * h * e, 2 * h * software.dropout_masks
    split = sequence_split(work)
    products = 2 * h * e / (1 if software.plain_torch else split)
    inner = (2 * h + 2 * kv) * e + _MLP_SAVED[shape.family] * shape.ffn * e
    if software.plain_torch and shape.family == "llama":  # rotated heads come out by heads
        inner += h * e  # so attention's output is copied into rows
    if software.flash:
        inner += _FP32 * shape.heads
    elif work.recompute != "selective":
        inner += shape.heads * shape.seq * (2 * e + 1 if software.dropout_masks else e)
    rotations = 0
    if software.plain_torch and shape.family == "llama":  # sine and cosine, for queries and keys
        rotations = 4 * _FP32 * shape.seq * shape.head_dim // 2
    return work.tokens * ((norms + masks) / split + products + inner / work.tp) + rotations


def block_kept(work: Work) -> float:
    """What a block keeps of one microbatch from its forward to its backward.

    Selective recomputation drops unfused attention's scores (arXiv 2205.05198, section 5); torch's
    keeps the outputs of products and attention (``zeropp/engine/recompute.py``) and drops the rest.
    """
    if work.recompute == "full":
        return boundary_bytes(work)
    if work.recompute == "none" or not work.software.plain_torch:
        return block_saved(work)
    shape, e = work.shape, element_bytes(work.precision)
    h, kv = shape.hidden, shape.kv_heads * shape.head_dim
    split = h + 2 * kv + h + _MLP_GATES[shape.family] * shape.ffn  # of the TP ranks
    whole = 2 * h  # of both row-parallel products, sums over the TP ranks to come
    attention = _FP32 * shape.heads * work.tokens / work.tp
    return boundary_bytes(work) + work.tokens * e * (split / work.tp + whole) + attention


def block_deferred(work: Work) -> float:
    """x and dY of every linear layer of a block, one microbatch."""
    shape, e = work.shape, element_bytes(work.precision)
    h, kv = shape.hidden, shape.kv_heads * shape.head_dim
    inputs = 2 * h / sequence_split(work) + (h + shape.ffn) / work.tp
    outputs = (h + 2 * kv + _MLP_GATES[shape.family] * shape.ffn) / work.tp + 2 * h
    return work.tokens * e * (inputs + outputs)


def block_forward(work: Work) -> float:
    """A block's own bytes at the fullest moment of its forward: what it keeps, the output of its
    last product and its own output; recomputed, the MLP's tensors come and go."""
    e, h, ffn = element_bytes(work.precision), work.shape.hidden, work.shape.ffn
    if work.recompute == "none":
        return block_saved(work) + work.tokens * 2 * h * e / sequence_split(work)
    mlp = work.tokens * e * (2 * h + _MLP_SAVED[work.shape.family] * ffn / work.tp)
    return block_kept(work) + mlp


def block_backward(work: Work, *, split: bool) -> float:
    """A block's own bytes at the fullest moment of its backward: what its forward saved (or saves
    again), the gradient of its output, and those inside the MLP's non-linearity. ``split``: the
    input of the last product waits for its weight gradient."""
    gradients = _MLP_GATES[work.shape.family] + (1 if split else 0)
    inside = gradients * work.shape.ffn / work.tp
    whole = work.shape.hidden / sequence_split(work)
    return block_saved(work) + work.tokens * element_bytes(work.precision) * (whole + inside)


def boundary_bytes(work: Work) -> float:
    """One microbatch's tensor between two blocks."""
    size = work.tokens * work.shape.hidden * element_bytes(work.precision)
    return size / sequence_split(work)


def head_kept(work: Work) -> float:
    """Input and output of the final norm, and the loss's fp32 softmax."""
    return 2 * boundary_bytes(work) + _FP32 * work.tokens * vocabulary(work)


def head_forward(work: Work) -> float:
    """The logits and their fp32 copy come beside what is kept."""
    e = element_bytes(work.precision)
    return head_kept(work) + work.tokens * vocabulary(work) * (e + (_FP32 if e < _FP32 else 0))


def head_backward(work: Work) -> float:
    """Torch's loss makes the gradients of its logarithms and of its input, both fp32; a fused one
    works in place and makes the logits' gradient alone."""
    made = 2 * _FP32 if work.software.plain_torch else element_bytes(work.precision)
    return head_kept(work) + work.tokens * vocabulary(work) * made


def vocabulary(work: Work) -> float:
    """Logits of a token on one rank."""
    return work.shape.vocab / (work.tp if work.software.vocab_parallel else 1)


def sequence_split(work: Work) -> int:
    """Ranks over which sequence parallelism splits what TP leaves whole."""
    return work.tp if work.sequence_parallel else 1


def stage_memory(plan: Plan, work: Work, stage: int) -> StageMemory:
    """Bytes of one stage on one of its ranks."""
    layout, software = plan.layout, work.software
    pieces = plan.pieces_of(stage)
    sizes = [_parameters(plan, i) for i in pieces]
    ends = [s for i, s in zip(pieces, sizes, strict=True) if i in (0, plan.shape.num_pieces - 1)]
    blocks, parameters = len(sizes) - len(ends), sum(sizes)
    made = parameters + _shared_gradients(plan, pieces)
    head = plan.shape.num_pieces - 1 in pieces
    e, gathers = element_bytes(plan.precision), plan.gathers
    kept, deferred = block_kept(work), block_deferred(work)
    activations = blocks * kept + head * head_kept(work)
    return StageMemory(
        parameters=int(parameters * software.parameter_bytes / layout.shard),
        optimizer=int(parameters * software.optimizer_bytes / optimizer_shards(layout, software)),
        gradients=int(parameters * software.gradient_bytes / layout.shard),
        unsharded=int(_gathered_copies(plan, stage) * parameters * e) if gathers else 0,
        unsharded_gradients=int(made * _accumulated_bytes(plan)) if gathers else 0,
        early_gradients=int((made - parameters + sum(ends)) * _accumulated_bytes(plan))
        if gathers
        else 0,
        fresh_gradients=_fresh_bytes(plan, sizes),
        reduction_step=int(_FP32 * max(sizes)) if gathers else 0,
        reduction_copy=int(_FP32 * _copied(plan, stage, sizes)) if gathers else 0,
        activations=int(activations),
        deferred=int(blocks * deferred),
        boundary=int(boundary_bytes(work)),
        forward=int(
            max(
                activations - kept + block_forward(work) if blocks else 0.0,
                blocks * kept + head_forward(work) if head else 0.0,
            )
        ),
        backward_input=int(_backward(work, blocks, head=head, deferred=deferred)),
        full_backward=int(_backward(work, blocks, head=head, deferred=0.0)),
    )


def _backward(work: Work, blocks: int, *, head: bool, deferred: float) -> float:
    """The stage's own bytes of a microbatch at the fullest moment of its backward: in the head, in
    the last block (the others still keep) or in the first (the others have deferred)."""
    kept = block_kept(work)
    fullest = blocks * kept + head_backward(work) if head else 0.0
    if blocks:
        inside = block_backward(work, split=deferred > 0)
        fullest = max(fullest, (blocks - 1) * max(kept, deferred) + inside)
    return fullest


def shares_ends(plan: Plan) -> bool:
    """Embedding and head are one parameter on one rank, in FSDP2's root group."""
    return plan.contender == "fsdp" and plan.shape.tied_embeddings


def _parameters(plan: Plan, piece: int) -> float:
    """Parameters of a piece on one rank, before ZeRO; those that both ends share are the first's."""
    size = piece_parameters(plan.shape, piece)
    if shares_ends(plan) and piece == plan.shape.num_pieces - 1:
        size -= plan.shape.vocab * plan.shape.hidden
    return size / plan.layout.tp


def _shared_gradients(plan: Plan, pieces: range) -> float:
    """Shared parameters are the first stage's, but their gradient comes with the last one's."""
    if not shares_ends(plan):
        return 0.0
    shared = plan.shape.vocab * plan.shape.hidden
    return shared * ((plan.shape.num_pieces - 1 in pieces) - (0 in pieces))


def _gathered_copies(plan: Plan, stage: int) -> int:
    """FSDP2's own hooks hold two pieces' copies: of this one, and the buffer that its gather or
    the next one's came in."""
    ends = (0, plan.schedule.num_stages - 1)
    return 2 if plan.contender == "fsdp" and stage not in ends else 1


def _copied(plan: Plan, stage: int, sizes: list[float]) -> float:
    """Parameters whose gradients a reduction still holds when it is done: ZeroPP reduces a chunk's
    pieces together, FSDP2's hooks hold one piece's and, after the last one, none."""
    if plan.contender == "zeropp":
        return sum(sizes)
    return 0.0 if plan.contender == "fsdp" and stage == 0 else max(sizes)


def _accumulated_bytes(plan: Plan) -> int:
    """A gradient that awaits its reduction: fp32 where microbatches are summed before it."""
    reduces_each = plan.contender == "fsdp" and plan.reduce_every == "unit"
    return element_bytes(plan.precision) if reduces_each else _FP32


def _fresh_bytes(plan: Plan, sizes: list[float]) -> int:
    """A microbatch's own 16-bit gradients before they are added to the sum: ZeroPP adds a chunk's
    when it has them all, FSDP2's hooks add piece by piece."""
    if not plan.gathers or plan.precision != "bf16":
        return 0
    return int(
        element_bytes(plan.precision) * (sum(sizes) if plan.contender == "zeropp" else max(sizes))
    )


def optimizer_shards(layout: Layout, software: Software) -> int:
    """Ranks over which the optimizer state is split."""
    return layout.shard * zero1_ranks(layout, software)


def zero1_ranks(layout: Layout, software: Software) -> int:
    """Replicas over which ZeRO-1 splits the optimizer state; 1 where there is no ZeRO-1."""
    if software.zero1_group:
        return min(software.zero1_group, layout.replicate)
    return layout.replicate if layout.replicate_zero else 1
