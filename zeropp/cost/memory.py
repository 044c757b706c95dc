"""Bytes of one stage on one rank: parameters, gradients, optimizer, activations, temporaries.

A test compares the sums with traces (``zeropp.engine.tracing``).
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from zeropp.cost.flops import half_parameters, piece_parameters
from zeropp.cost.kernels import Work, element_bytes
from zeropp.cost.plan_price import StageMemory
from zeropp.layout import Layout
from zeropp.literals import BlockHalf
from zeropp.programs import Program

if TYPE_CHECKING:
    from zeropp.plan import SizedPlan


# Bytes of one microbatch's tensors in a block, in the head and between stages, on one rank.
#
# Saved tensors are listed one by one, as in arXiv 2205.05198 (eq. 1 to 4), also for fused attention
# and for Llama. What programs on plain torch operators keep and allocate in addition was read from
# traces (``zeropp.engine.tracing``); a test compares these formulas with the traces.


FP32 = 4


def boundary_bytes(work: Work) -> float:
    """Bytes of the hidden states between two blocks, which are also a stage's input and output."""
    size = work.tokens * work.shape.hidden * element_bytes(work.precision)
    return size / sequence_split(work)


def _input_bytes(work: Work) -> int:
    """Bytes per element of the input that a product of a block keeps for its weight gradient."""
    return 1 if work.program.eight_bit else element_bytes(work.precision)


def _mlp_saved(work: Work) -> int:
    """How many tensors [tokens, ffn] the MLP saves: input and output of its non-linearity; with a
    gate its input, the gate's non-linearity (unless that is computed again), up, and the product
    of the last two."""
    if work.shape.gates == 1:
        return 2
    return 3 if work.program.fused_gate else 4


def _mlp_saved_bytes(work: Work) -> float:
    """Their bytes per token; the last is the input of a product."""
    others = (_mlp_saved(work) - 1) * element_bytes(work.precision)
    return work.shape.ffn * (others + _input_bytes(work))


def block_saved(work: Work) -> float:
    """Bytes that a block's backward needs from its forward.

    Only sequence parallelism splits over the TP ranks the inputs of both norms, the masks of both
    dropouts before residual additions and, in programs that gather them again for the backward
    (DTensor does not), the inputs of the products. Everything between is split by TP in any case.
    """
    shape, program = work.shape, work.program
    e, h, kv = element_bytes(work.precision), shape.hidden, shape.kv_heads * shape.head_dim
    split = sequence_split(work)
    norms = (2 * h * e + 2 * h * program.dropout_masks) / split
    products = 2 * h * _input_bytes(work) / (1 if program.keeps_gathered_inputs else split)
    inner = (2 * h + 2 * kv) * e + _mlp_saved_bytes(work) + h * program.eight_bit  # a cast
    if program.flash:
        inner += FP32 * shape.heads
    elif work.recompute != "selective":
        inner += shape.heads * shape.seq * (2 * e + 1 if program.dropout_masks else e)
    rotations = 0
    if not program.fused_rotary and shape.family == "llama":
        inner += h * e  # rotated heads are contiguous, so attention's output is copied into rows
        rotations = 4 * FP32 * shape.seq * shape.head_dim // 2  # sines, cosines; queries and keys
    return work.tokens * (norms + products + inner / work.tp) + rotations


def half_saved(work: Work, half: BlockHalf) -> float:
    """What the backward of one half of a block needs of its forward. Each half keeps the inputs of
    a norm and of a product; what the MLP keeps inside is known, and the rest is attention's."""
    mlp = _half_inputs(work) + work.tokens * _mlp_saved_bytes(work) / work.tp
    return mlp if half == "mlp" else block_saved(work) - mlp


def _half_inputs(work: Work) -> float:
    """The inputs of one half's norm and first product, as ``block_saved`` counts them."""
    e, h, split = element_bytes(work.precision), work.shape.hidden, sequence_split(work)
    norm = (h * e + h * work.program.dropout_masks) / split
    gathered = 1 if work.program.keeps_gathered_inputs else split
    return work.tokens * (norm + h * _input_bytes(work) / gathered)


def block_kept(work: Work) -> float:
    """Bytes that a block keeps from its forward to its backward.

    With selective recomputation they depend on the program (``Program.selective``).
    """
    if work.recompute == "full":
        return boundary_bytes(work)
    if work.recompute == "none" or work.program.selective == "scores":
        return block_saved(work)
    if work.program.selective == "half":
        return (boundary_bytes(work) + block_saved(work)) / 2
    shape, e = work.shape, element_bytes(work.precision)
    h, kv = shape.hidden, shape.kv_heads * shape.head_dim
    split = (2 * h + 2 * kv + shape.gates * shape.ffn) * e + FP32 * shape.heads
    sums = 2 * h * e  # outputs of the row-parallel products, whole on every TP rank
    return boundary_bytes(work) + work.tokens * (split / work.tp + sums)


def block_deferred(work: Work) -> float:
    """Bytes that wait for a block's weight gradients: x and dY of every linear layer.

    Torch's pipeline stages split the backward in the autograd graph: then no saved tensor is freed,
    and a gradient is held for every parameter (``torch.distributed.pipelining._backward``).
    """
    shape, e = work.shape, element_bytes(work.precision)
    h, kv = shape.hidden, shape.kv_heads * shape.head_dim
    outputs = (h + 2 * kv + shape.gates * shape.ffn) / work.tp
    if work.program.torch_stages:
        return block_saved(work) + work.tokens * e * (outputs + 4 * h)
    inputs = 2 * h / sequence_split(work) + (h + shape.ffn) / work.tp
    return work.tokens * e * (inputs + outputs + 2 * h)


def half_deferred(work: Work, half: BlockHalf) -> float:
    """What waits for the weight gradients of one half of a block (see ``block_deferred``)."""
    shape, e = work.shape, element_bytes(work.precision)
    h, kv = shape.hidden, shape.kv_heads * shape.head_dim
    if half == "attention":
        inside, wide = h, h + 2 * kv  # the output's input; queries, keys and values
    else:
        inside, wide = shape.ffn, shape.gates * shape.ffn
    if work.program.torch_stages:
        return half_saved(work, half) + work.tokens * e * (wide / work.tp + 2 * h)
    inputs = h / sequence_split(work) + inside / work.tp
    return work.tokens * e * (inputs + wide / work.tp + h)


def block_forward(work: Work) -> float:
    """Bytes of a block at the fullest moment of its forward: what it keeps, the output of its last
    product and its own output; if it is recomputed, temporarily also the MLP's tensors."""
    e, h = element_bytes(work.precision), work.shape.hidden
    inside = _mlp_saved(work) * work.shape.ffn / work.tp
    if work.recompute == "none":
        inside = 0.0
    return block_kept(work) + work.tokens * e * (2 * h / sequence_split(work) + inside)


def block_backward(work: Work, *, split: bool) -> float:
    """Bytes of a block at the fullest moment of its backward: what its forward has saved (or saves
    again), the gradient of its output, and the gradients in the MLP's non-linearity. ``split``: the
    input of the last product also waits for the weight gradient, or nothing is freed at all."""
    e, inside = element_bytes(work.precision), work.shape.ffn / work.tp
    if split and work.program.torch_stages:
        return block_deferred(work) + work.tokens * e * inside
    inside *= work.shape.gates + split
    # The output is joined again from the slices of the TP ranks.
    outputs = 1 + (work.program.pipe_buffers and work.tp > 1)
    product = work.program.separate_weight_gradient * work.shape.hidden * work.shape.ffn / work.tp
    return block_saved(work) + outputs * boundary_bytes(work) + e * (work.tokens * inside + product)


def half_backward(work: Work, half: BlockHalf, *, split: bool) -> float:
    """Likewise for one half of a block. Attention is fullest when the gradients of queries, keys
    and values are made."""
    shape, e = work.shape, element_bytes(work.precision)
    wide = shape.ffn if half == "mlp" else shape.hidden + 2 * shape.kv_heads * shape.head_dim
    inside = work.tokens * e * wide / work.tp
    if split and work.program.torch_stages:
        return half_deferred(work, half) + inside
    if half == "mlp":
        return block_backward(work, split=split) - half_saved(work, "attention")
    waiting = split * work.tokens * e * shape.hidden / work.tp
    return half_saved(work, half) + boundary_bytes(work) + inside + waiting


def logits_bytes(work: Work, size: int) -> float:
    """Bytes of the logits with ``size`` bytes per element."""
    split = work.tp if work.program.vocab_parallel else 1
    return work.tokens * work.shape.vocab / split * size


def head_kept(work: Work) -> float:
    """Bytes that the head keeps: input and output of the final norm, and the fp32 softmax of the
    loss, or the logits if the loss is fused. Torch's pipeline stages keep their outputs, so that
    the logits are always kept."""
    size = element_bytes(work.precision) if work.program.fused_loss else FP32
    kept = 2 * boundary_bytes(work) + logits_bytes(work, size)
    if work.program.torch_stages and not work.program.fused_loss:
        kept += logits_bytes(work, element_bytes(work.precision))
    return kept


def head_deferred(work: Work) -> float:
    """Bytes that wait for the head's weight gradient, which only torch's pipeline stages delay."""
    if not work.program.torch_stages:
        return 0.0
    return 2 * boundary_bytes(work) + logits_bytes(work, element_bytes(work.precision))


def head_forward(work: Work) -> float:
    """Bytes of temporaries in the head's forward: the logits and, unless fused, their fp32 copy.
    Megatron's loss turns that copy into the softmax, which the head keeps."""
    e = element_bytes(work.precision)
    if work.program.fused_loss:
        return 0.0
    if work.program.loss_gradient == "in_place":
        return logits_bytes(work, e) if e < FP32 else 0.0
    return logits_bytes(work, e + (FP32 if e < FP32 else 0))


def head_backward(work: Work) -> float:
    """Bytes of temporaries in the head's backward. Torch's loss makes fp32 gradients of its
    logarithms and of its input and, if cut by the vocabulary, a third tensor
    (``distributed/tensor/parallel/loss.py``). A fused loss works in place and makes only the
    gradient of the logits."""
    if work.program.fused_loss or work.program.loss_in_place(work.tp):
        return logits_bytes(work, element_bytes(work.precision))
    return logits_bytes(work, (3 if work.tp > 1 else 2) * FP32)


def sequence_split(work: Work) -> int:
    """The number of ranks over which sequence parallelism splits what TP leaves whole."""
    return work.tp if work.sequence_parallel else 1


# Bytes of one stage's parameters, gradients and optimizer state on one rank.
#
# They follow arXiv 1910.02054 (section 3.1), with the bytes per parameter that the program keeps.
# What FSDP2 gathers, sums and copies follows
# ``torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py`` and ``_fsdp_param_group.py`` (torch
# 2.13).


def state_memory(plan: SizedPlan, work: Work, stage: int) -> dict[str, int]:
    """The fields of ``StageMemory`` for parameters, gradients and optimizer state, and for what
    gathers and reductions copy."""
    layout, program = plan.layout, work.program
    state = program.state(plan.precision)
    pieces = plan.pieces_of(stage)
    sizes = {i: _parameters(plan, program, i) for i in pieces}
    ends = [size for i, size in sizes.items() if i in (0, plan.shape.num_pieces - 1)]
    parts = _in_order(plan, stage, sizes)
    whole, more = sum(parts), _more_gradients(plan, program, pieces)
    separate = plan.gathers or program.fsdp_hooks
    # With a single shard, the optimizer reads the flat buffer itself.
    summed = _summed_bytes(plan, work) * separate * (layout.shard > 1 or not program.flat_chunks)
    half = _unsummed_bytes(plan, summed) * separate
    found = {
        "parameters": whole * _parameter_bytes(plan, program) / layout.shard
        + _kept_buffers(plan, program, whole),
        "optimizer": whole * state.optimizer / optimizer_shards(layout, program),
        "gradients": whole * state.gradients / layout.shard + whole * state.half_gradients,
        "unsharded": whole * _gathered_bytes(plan, work, stage) * separate,
        "unsharded_gradients": (whole + more) * summed,
        "early_gradients": (sum(ends) + more) * summed,
        "fresh_gradients": half * (parts[0] + more) * (not program.flat_chunks),
        "embedding_gradient": _embedding_gradient(plan, program, pieces),
        "made_gradients": half * whole * program.torch_stages,
        "reduction_step": _reduction_step(plan, program, parts) * separate,
        "reduction_copy": _copied(plan, work, stage, parts) * separate,
        "flat_gradients": _flattened(plan, program, whole),
    }
    return {kind: int(size) for kind, size in found.items()}


def _in_order(plan: SizedPlan, stage: int, whole: dict[int, float]) -> list[float]:
    """The parameters of a stage's pieces and halves of blocks, in their order; ``whole`` has them
    per piece."""
    sizes = dict(whole)
    for piece, half in plan.halves_of(stage):
        sizes[piece] = half_parameters(plan.shape, half) / plan.layout.tp
    return [sizes[piece] for piece in sorted(sizes)]


def sends_compute_type(plan: SizedPlan, program: Program) -> bool:
    """Whether replicas send each other updated parameters in the type of compute. This is so with
    ZeRO-1 over flat chunks in mixed precision: a rank keeps its part in that type, and fp32 masters
    only of the rows that it updates."""
    mixed = program.state(plan.precision).casts_parameters
    return program.flat_chunks and mixed and zero1_ranks(plan.layout, program) > 1


def _parameter_bytes(plan: SizedPlan, program: Program) -> float:
    """Resident bytes of a parameter, on one of the ranks over which ZeRO-3 shards it."""
    each = program.state(plan.precision).parameters
    if program.flattens_gradients and plan.precision == "fp32" and plan.layout.replicate_zero:
        return each * (1 + 1 / plan.layout.replicate)  # DeepSpeed has masters of its own rows
    if sends_compute_type(plan, program):
        return each / zero1_ranks(plan.layout, program) + element_bytes(plan.precision)
    return each


def _kept_buffers(plan: SizedPlan, program: Program, parameters: float) -> float:
    """Bytes of the two buffers into which DeepSpeed's ZeRO-1 copies gradients in fp32, each of at
    most 5e8 elements (``runtime/zero/stage_1_and_2.py``: ``setup_buckets``, ``reduce_gradients``;
    baselines/deepspeed_3d makes them no larger than the rank's parameters)."""
    if program.flattens_gradients and plan.precision == "fp32" and plan.layout.replicate_zero:
        return 2 * FP32 * min(parameters, 5e8)
    return 0.0


def shares_ends(plan: SizedPlan, program: Program) -> bool:
    """Whether embedding and head are one parameter on one rank, in FSDP2's root group."""
    return program.fsdp_root and plan.shape.tied_embeddings


def _parameters(plan: SizedPlan, program: Program, piece: int) -> float:
    """Parameters of a piece on one rank, without ZeRO; shared embeddings count in the first."""
    size = piece_parameters(plan.shape, piece)
    one_chunk = program.flat_chunks and plan.shape.tied_embeddings and plan.schedule.num_stages == 1
    if (shares_ends(plan, program) or one_chunk) and piece == plan.shape.num_pieces - 1:
        size -= plan.shape.vocab * plan.shape.hidden
    whole = 0  # only sequence parallelism cuts learned positions
    if piece == 0 and plan.shape.family == "gpt" and not plan.layout.sequence_parallel:
        whole = plan.shape.seq * plan.shape.hidden
    return (size - whole) / plan.layout.tp + whole


def _more_gradients(plan: SizedPlan, program: Program, pieces: range) -> float:
    """Gradient elements in addition to those of the stage's parameters. Parameters that the first
    and the last stage share belong to the first, but their gradient begins in the last. DTensor's
    embedding makes the gradient of the whole vocabulary on every TP rank
    (``embedding_dense_backward``)."""
    vocabulary = plan.shape.vocab * plan.shape.hidden
    if shares_ends(plan, program):
        return vocabulary * ((plan.shape.num_pieces - 1 in pieces) - (0 in pieces))
    if program.whole_embedding_gradient and 0 in pieces:
        return vocabulary * (1 - 1 / plan.layout.tp)
    return 0.0


def _gathered_bytes(plan: SizedPlan, work: Work, stage: int) -> int:
    """Bytes of a stage's gathered parameters. FSDP2's hooks hold two pieces: this one, and the
    buffer of its gather or of the next one."""
    if plan.layout.shard == 1 and sends_compute_type(plan, work.program):
        return 0  # what is resident is what compute reads
    ends = (0, plan.schedule.num_stages - 1)
    buffers = 2 if work.program.fsdp_root and stage not in ends else 1
    return buffers * element_bytes(plan.precision)


def _summed_bytes(plan: SizedPlan, work: Work) -> int:
    """Bytes per gradient that waits for its reduction: fp32 if microbatches are summed first."""
    each = work.program.fsdp_root and plan.reduce_every == "unit"
    return element_bytes(plan.precision) if each else FP32


def _unsummed_bytes(plan: SizedPlan, summed: int) -> int:
    """Bytes per gradient of a microbatch before it is added to an fp32 sum; 0 if there is no such
    sum. FSDP2's hooks add gradients piece by piece, those of the first piece last."""
    element = element_bytes(plan.precision)
    return element if summed > element else 0


def _embedding_gradient(plan: SizedPlan, program: Program, pieces: range) -> float:
    """Bytes of a microbatch's embedding gradient. In a flat chunk only this gradient is a tensor of
    its own before it is added to the sum, since products add theirs directly."""
    vocabulary = plan.shape.vocab * plan.shape.hidden
    return element_bytes(plan.precision) * vocabulary * (0 in pieces) * program.flat_chunks


def _reduction_step(plan: SizedPlan, program: Program, sizes: list[float]) -> float:
    """Bytes that a reduction allocates: FSDP2 copies the gradients of one piece at a time; those of
    a flat chunk are sent directly, or cast first if they are sent in 16 bits."""
    if program.flat_chunks:
        return _cast_bytes(plan) * sum(sizes)
    return FP32 * max(sizes)


def _copied(plan: SizedPlan, work: Work, stage: int, sizes: list[float]) -> float:
    """Bytes of gradients that are still held after a reduction: the whole buffer of a flat chunk;
    with FSDP2's hooks those of one piece and, after the first stage's reduction, none."""
    if work.program.flat_chunks:
        return (FP32 + _cast_bytes(plan)) * sum(sizes) * (plan.layout.shard > 1)
    return FP32 * (0.0 if work.program.fsdp_root and stage == 0 else max(sizes))


def _cast_bytes(plan: SizedPlan) -> int:
    return 2 if plan.reduce_dtype == "bf16" and plan.layout.shard > 1 else 0


def _flattened(plan: SizedPlan, program: Program, parameters: float) -> float:
    """Bytes of the copy of gradients that DeepSpeed makes to reduce them: in bf16 all of them, cast
    to 16 bits; in fp32 at most 5e8 elements at a time, in one tensor (``runtime/engine.py``:
    ``allreduce_bucket``, ``MEMORY_OPT_ALLREDUCE_SIZE``)."""
    if not program.flattens_gradients or plan.layout.replicate == 1:
        return 0.0
    return 2 * parameters if plan.precision == "bf16" else FP32 * min(parameters, 5e8)


def optimizer_shards(layout: Layout, program: Program) -> int:
    """The number of ranks over which the optimizer state is sharded."""
    return layout.shard * zero1_ranks(layout, program)


def zero1_ranks(layout: Layout, program: Program) -> int:
    """The number of replicas over which ZeRO-1 shards the optimizer state; 1 without ZeRO-1."""
    if program.zero1_group:
        return min(program.zero1_group, layout.replicate)
    return layout.replicate if layout.replicate_zero else 1


def stage_memory(plan: SizedPlan, work: Work, stage: int) -> StageMemory:
    """Bytes of one stage on one of its ranks."""
    head = plan.shape.num_pieces - 1 in plan.pieces_of(stage)
    message, buffers = _messages(plan, work, stage)
    halves = tuple(half for _, half in plan.halves_of(stage))
    repeated = plan.recomputed_blocks(stage)
    plain = plan.blocks_of(stage) - repeated
    return StageMemory(
        buffers=int(buffers),
        **_of_microbatch(
            work, plain=plain, repeated=repeated, halves=halves, head=head, message=message
        ),
        **state_memory(plan, work, stage),
    )


@lru_cache(maxsize=16384)
def _of_microbatch(
    work: Work,
    *,
    plain: int,
    repeated: int,
    halves: tuple[BlockHalf, ...],
    head: bool,
    message: float,
) -> dict[str, int]:
    """The bytes of one microbatch in a stage of ``plain`` blocks, ``repeated`` blocks that are
    recomputed and ``halves`` of blocks, by the fields of StageMemory; ``message`` is what it holds
    for messages. Many plans have such stages."""
    blocks = _blocks(work, plain, repeated, halves)
    activations, later = _kept(work, blocks, head=head)
    activations += message
    return {
        "activations": int(activations),
        "deferred": int(later),
        "boundary": int(boundary_bytes(work)),
        **_moments(
            work, blocks, repeated=repeated, head=head, activations=activations, later=later
        ),
    }


class _Bytes(NamedTuple):
    """Bytes of one block, or of half a block, for one microbatch."""

    kept: float  # from its forward to its backward
    deferred: float  # from its input gradient to its weight gradient
    split: float  # at the fullest moment of its input gradient
    full: float  # at the fullest moment of its full backward


def _blocks(work: Work, whole: int, repeated: int, halves: tuple[BlockHalf, ...]) -> list[_Bytes]:
    """The blocks and halves of blocks of a stage, in their order; the first ones are recomputed,
    and ``whole`` ones follow that are not."""
    plain = replace(work, recompute="none")
    held = repeated * [_block(work)] if repeated else []
    held += whole * [_block(plain)]
    for half in halves:
        held.insert(0 if half == "mlp" else len(held), _half(plain, half))
    return held


def _block(work: Work) -> _Bytes:
    return _Bytes(
        block_kept(work),
        block_deferred(work),
        block_backward(work, split=True),
        block_backward(work, split=False),
    )


def _half(work: Work, half: BlockHalf) -> _Bytes:
    return _Bytes(
        half_saved(work, half),
        half_deferred(work, half),
        half_backward(work, half, split=True),
        half_backward(work, half, split=False),
    )


def _kept(work: Work, blocks: list[_Bytes], *, head: bool) -> tuple[float, float]:
    """(bytes kept from a forward to its input gradient, bytes kept from there to its weight
    gradient). Torch's pipeline stages also keep their outputs and, with delayed weight gradients,
    the gradient of their input."""
    runtime = work.program.torch_stages
    output = 0.0 if head or not runtime else boundary_bytes(work)
    activations = sum(block.kept for block in blocks) + head * head_kept(work) + output
    later = sum(block.deferred for block in blocks) + head * head_deferred(work)
    return activations, later + (boundary_bytes(work) if runtime else 0.0)


def _messages(plan: SizedPlan, work: Work, stage: int) -> tuple[float, float]:
    """(bytes per microbatch from its forward to its backward, bytes that are always held) for
    messages, in addition to a message itself.

    DeepSpeed's pipeline engine receives into two permanent buffers, copies inputs out of them
    twice, and keeps outputs, of which each TP rank has a part; the last stage keeps the logits of
    two microbatches (``runtime/pipe/engine.py``: ``pipe_buffers``).
    """
    if not work.program.pipe_buffers:
        return 0.0, 0.0
    part = boundary_bytes(work) / work.tp
    held = buffers = 0.0
    if stage > 0:
        buffers += part
        held += part * (work.tp == 1)
    if stage < plan.schedule.num_stages - 1:
        held, buffers = held + part, buffers + part
    else:
        outputs = min(2, plan.num_microbatches)
        buffers += outputs * logits_bytes(work, element_bytes(work.precision))
    return held, buffers


def _moments(
    work: Work, blocks: list[_Bytes], *, repeated: int, head: bool, activations: float, later: float
) -> dict[str, int]:
    """The stage's bytes of a microbatch at the fullest moment of its forward and of each backward.

    ``repeated`` is the number of blocks that are recomputed. A backward goes through the blocks
    from the last one to the first: blocks that it has not reached still keep their tensors, and
    those that it has passed keep what their weight gradients need.
    """
    plain = work if repeated == len(blocks) else replace(work, recompute="none")
    last = block_forward(plain) - block_kept(plain) if blocks else 0.0
    again = block_forward(work) - block_kept(work) if repeated else 0.0
    in_head = head_forward(work) if head else 0.0
    split = full = activations + head * head_backward(work)
    before, behind = sum(block.kept for block in blocks), 0.0
    for block in reversed(blocks):
        before -= block.kept
        split = max(split, behind + before + block.split)
        full = max(full, before + block.full)
        behind += block.deferred
    if blocks:  # when the first block is reached, the head waits for its weight gradient, too
        split = max(split, later - blocks[0].deferred + blocks[0].split)
    return {
        "forward": int(activations + max(last, again, in_head)),
        "backward_input": int(max(split, later)),
        "full_backward": int(full),
    }
