"""Bytes of one stage on one rank: parameters, gradients, optimizer, activations, temporaries.

Parameters, gradients and optimizer state follow arXiv 1910.02054 (section 3.1), with the bytes per
parameter that the program keeps. What FSDP2 gathers, sums and copies follows
``torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py`` and ``_fsdp_param_group.py`` (torch
2.13). A test compares the sums with traces (``zeropp.emulate.memory``).
"""

from __future__ import annotations

from functools import lru_cache

from zeropp.price.activations import (
    FP32,
    attention_saved,
    block_backward,
    block_deferred,
    block_forward,
    block_kept,
    boundary_bytes,
    head_backward,
    head_deferred,
    head_forward,
    head_kept,
    joined_bytes,
    logits_bytes,
)
from zeropp.price.flops import linear_weights, piece_parameters
from zeropp.price.kernels import element_bytes
from zeropp.price.pieces import Work, gradients_of
from zeropp.price.plan_price import StageMemory
from zeropp.price.programs import Program, gathers
from zeropp.schedule.plan import SizedPlan
from zeropp.types.frozen import replace
from zeropp.types.layout import Layout
from zeropp.types.literals import Offloaded


def state_memory(plan: SizedPlan, work: Work, stage: int) -> dict[str, int]:
    """The fields of ``StageMemory`` for parameters, gradients and optimizer state, and for what
    gathers and reductions copy."""
    layout, program = plan.layout, work.program
    state = program.state(plan.precision)
    pieces = plan.pieces_of(stage)
    sizes = [_parameters(plan, program, piece) for piece in pieces]
    last = plan.shape.num_pieces - 1
    ends = sum(size for piece, size in zip(pieces, sizes, strict=True) if piece in (0, last))
    whole, more = sum(sizes), _more_gradients(plan, program, pieces)
    element, vocabulary = element_bytes(plan.precision), plan.shape.vocab * plan.shape.hidden
    zero2 = layout.replicas if layout.replicate_zero == 2 else 1  # replicas that share sums
    separate = gathers(plan) or program.fsdp_hooks
    # Gradients wait for their reduction in fp32 if microbatches are summed first. With a single
    # shard, the optimizer reads the flat buffer itself.
    summed = element if program.fsdp_root and plan.reduce_every == "unit" else FP32
    summed = min(summed, element_bytes(plan.sum_dtype)) if program.fsdp_hooks else summed
    summed *= separate * (layout.shards > 1 or not program.flat_chunks)
    # Those of a microbatch are apart before they are added to an fp32 sum.
    unsummed = element * separate if summed > element else 0
    # FSDP2 copies the gradients of one piece at a time to reduce them; those of a flat
    # chunk are sent directly, or cast first if they are sent in 16 bits.
    cast = 2 if plan.reduce_dtype == "bf16" and layout.shards > 1 else 0
    step = cast * whole if program.flat_chunks else FP32 * max(sizes)
    # After a reduction the whole buffer of a flat chunk is still held; with FSDP2's hooks the
    # gradients of one piece and, after the first stage's reduction, none.
    copied = FP32 * (0.0 if program.fsdp_root and stage == 0 else max(sizes))
    if program.flat_chunks:
        copied = (FP32 + cast) * whole * (layout.shards > 1)
    state_bytes = {
        "parameters": whole * _parameter_bytes(plan, program) / layout.shards
        + _kept_buffers(plan, program, whole),
        "optimizer": whole * state.optimizer / optimizer_shards(layout, program),
        "gradients": whole * state.gradients / layout.shards / zero2 + whole * state.half_gradients,
        "unsharded": _gathered_bytes(plan, work, stage, whole) * separate
        + _zero3_gathered(plan, work),
        "unsharded_gradients": (whole + more) * summed,
        "early_gradients": (ends + more) * summed,
        # FSDP2's hooks add gradients piece by piece, those of the first piece last. In a flat chunk
        # products add theirs directly, so that only the embedding's is a tensor of its own.
        "fresh_gradients": unsummed * (sizes[0] + more) * (not program.flat_chunks),
        "embedding_gradient": element * vocabulary * (0 in pieces) * program.flat_chunks,
        "made_gradients": unsummed * whole * program.torch_stages,
        "reduction_step": step * separate,
        "reduction_copy": copied * separate,
        "flat_gradients": _flattened(plan, program, whole),
        "whole": 0.0,  # AdamW and SGD work on parts
    }
    return {kind: int(size) for kind, size in state_bytes.items()}


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
        return each * (1 + 1 / plan.layout.replicas)  # DeepSpeed has masters of its own rows
    if sends_compute_type(plan, program):
        return each / zero1_ranks(plan.layout, program) + element_bytes(plan.precision)
    return each


def _kept_buffers(plan: SizedPlan, program: Program, parameters: float) -> float:
    """Bytes of the buffers into which DeepSpeed's ZeRO copies gradients, each of a bucket
    (``runtime/zero/stage_1_and_2.py``: ``setup_buckets``; baselines/deepspeed_3d makes them no
    larger than the rank's parameters): two where reductions run beside a backward, and the copy
    that one makes, which begins inside a backward only if a bucket becomes full there. Otherwise
    there is one; ``reduce_gradients`` makes the second behind the backwards. ZeRO-3 has one of the
    bucket's size, whatever the rank has."""
    bucket = program.state(plan.precision).bucket
    if program.live_parameters:
        return (2 if plan.reduce_dtype == "bf16" else FP32) * bucket
    if not bucket or not plan.layout.replicate_zero:
        return 0.0
    buffer = element_bytes(plan.precision) * min(parameters, bucket)
    if not program.overlap_reduction:
        return buffer
    return 2 * buffer + _bucket_copy(plan, program, parameters) * (parameters > bucket)


def _zero3_gathered(plan: SizedPlan, work: Work) -> float:
    """Bytes of the parameters that DeepSpeed's ZeRO-3 has gathered: those that stay, and as many
    others as it allows; and of the second copy of the others, where there is one."""
    program = work.program
    if not program.live_parameters or plan.layout.shards == 1:
        return 0.0
    tensors = sum(gradients_of(plan, work, 0), ())
    stay = sum(n for n in tensors if n <= program.persistent)
    others, ranks = sum(tensors) - stay, program.zero_hpz_partition_size
    again = others / ranks * (ranks > 1)
    return element_bytes(plan.precision) * (stay + min(others, program.live_parameters) + again)


def _bucket_copy(plan: SizedPlan, program: Program, parameters: float) -> float:
    """Bytes of the copy of a bucket, or of a parameter that is larger, which DeepSpeed's ZeRO
    reduces (``runtime/zero/stage_1_and_2.py``: ``allreduce_bucket``)."""
    shape, bucket = plan.shape, program.state(plan.precision).bucket
    largest = max(shape.vocab, shape.ffn) * shape.hidden / plan.layout.tp
    return program.state(plan.precision).reduced * min(parameters, max(bucket, largest))


def shares_ends(plan: SizedPlan, program: Program) -> bool:
    """Whether embedding and head are one parameter on one rank, in FSDP2's root group."""
    return program.fsdp_root and plan.shape.tied_embeddings


def _parameters(plan: SizedPlan, program: Program, piece: int) -> float:
    """Parameters of a piece on one rank, without ZeRO; shared embeddings count in the first."""
    size = piece_parameters(plan.shape, piece)
    one_chunk = program.flat_chunks or program.live_parameters > 0
    one_chunk = one_chunk and plan.shape.tied_embeddings and plan.schedule.num_stages == 1
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


def gathered_in_8_bits(plan: SizedPlan, program: Program, stage: int) -> float:
    """Parameters of a stage, on one rank without ZeRO, whose gathers, by ZeRO-3 or of what ZeRO-1
    has updated, bring 8 bits of each."""
    if plan.precision != "fp8" or not program.gathers_casts:
        return 0.0
    return plan.blocks[stage] * linear_weights(plan.shape) / plan.layout.tp


def _gathered_bytes(plan: SizedPlan, work: Work, stage: int, parameters: float) -> float:
    """Bytes of a stage's gathered parameters. FSDP2's hooks hold two pieces: this one, and the
    buffer of its gather or of the next one, which counts little where all pieces stay."""
    if plan.layout.shards == 1 and sends_compute_type(plan, work.program):
        return 0  # what is resident is what compute reads
    one_by_one = work.program.reshard_after_forward and work.program.reshard_after_backward
    ends = (0, plan.schedule.num_stages - 1)
    buffers = 2 if work.program.fsdp_root and stage not in ends and one_by_one else 1
    in_8_bits = gathered_in_8_bits(plan, work.program, stage)
    return buffers * (parameters * element_bytes(plan.precision) - in_8_bits)


def _flattened(plan: SizedPlan, program: Program, parameters: float) -> float:
    """Bytes of the copy of gradients that DeepSpeed makes to reduce them: with buckets one of them,
    beside the second buffer; otherwise in bf16 all of them, cast to 16 bits to be
    sent so, and in fp32 at most 5e8 elements at a time, in one tensor (``runtime/engine.py``:
    ``allreduce_bucket``, ``MEMORY_OPT_ALLREDUCE_SIZE``)."""
    if not program.flattens_gradients or plan.layout.replicas == 1:
        return 0.0
    bucket = program.state(plan.precision).bucket
    if bucket and plan.layout.replicate_zero:
        buffer = element_bytes(plan.precision) * min(parameters, bucket)
        return (buffer + _bucket_copy(plan, program, parameters)) * (not program.overlap_reduction)
    if plan.precision == "fp32":
        return FP32 * min(parameters, 5e8)
    return 2 * parameters * (program.bf16.reduced == 2)


def optimizer_shards(layout: Layout, program: Program) -> int:
    """The number of ranks over which the optimizer state is sharded."""
    return layout.shards * zero1_ranks(layout, program)


def zero1_ranks(layout: Layout, program: Program) -> int:
    """The number of replicas over which ZeRO-1 shards the optimizer state; 1 without ZeRO-1."""
    if program.zero1_group:
        return min(program.zero1_group, layout.replicas)
    return layout.replicas if layout.replicate_zero else 1


def stage_memory(plan: SizedPlan, work: Work, stage: int) -> StageMemory:
    """Bytes of one stage on one of its ranks, whatever its plan offloads."""
    head = plan.shape.num_pieces - 1 in plan.pieces_of(stage)
    message, buffers = _messages(plan, work, stage)
    repeated = plan.recomputed_per_stage[stage]
    plain = plan.blocks[stage] - repeated
    return StageMemory(
        buffers=int(buffers),
        sent=0,
        **_of_microbatch(work, plain=plain, repeated=repeated, head=head, message=message),
        **state_memory(plan, work, stage),
    )


def offloaded_bytes(plan: SizedPlan, work: Work) -> list[int]:
    """Per stage, the bytes of one microbatch that wait in the host's memory."""
    again, once = _leaves(work, plan.offloads)
    stages = zip(plan.offloaded_per_stage, plan.recomputed_per_stage, strict=True)
    return [
        int(min(sent, repeated) * again + max(0, sent - repeated) * once)
        for sent, repeated in stages
    ]


@lru_cache(maxsize=4096)
def _leaves(work: Work, offloads: Offloaded) -> tuple[float, float]:
    """What a block sends that is recomputed, and one that is not."""
    leaves = block_kept if offloads == "all" else attention_saved
    return leaves(work), leaves(replace(work, recompute="none"))


@lru_cache(maxsize=16384)
def _of_microbatch(
    work: Work,
    *,
    plain: int,
    repeated: int,
    head: bool,
    message: float,
) -> dict[str, int]:
    """The bytes of one microbatch in a stage of ``repeated`` blocks that are recomputed and
    ``plain`` ones behind them that are not, by the fields of StageMemory; ``message`` is what it
    holds for messages. Many plans have such stages.

    A backward goes through the blocks from the last one to the first: blocks that it has not
    reached still keep their tensors, and those that it has passed keep what their weight gradients
    need. Torch's pipeline stages also keep their outputs, all the time.
    """
    once = replace(work, recompute="none")
    # Of each block, bytes from its forward to its backward; from its input gradient to its weight
    # gradient; and at the fullest moments of its input gradient and of its full backward.
    bytes_of = {
        each: (
            block_kept(each),
            block_deferred(each),
            block_backward(each, split=True),
            block_backward(each, split=False),
        )
        for each in (work, once)
    }
    blocks = repeated * [bytes_of[work]] + plain * [bytes_of[once]]
    output = boundary_bytes(work) * (work.program.torch_stages and not head)
    activations = sum(kept for kept, *_ in blocks) + head * head_kept(work) + output + message
    later = sum(deferred for _, deferred, *_ in blocks) + head * head_deferred(work)
    one = work if repeated == len(blocks) else once
    last = block_forward(one) - block_kept(one) if blocks else 0.0
    again = block_forward(work) - block_kept(work) if repeated else 0.0
    in_head = head_forward(work) if head else 0.0
    split = full = activations + head * head_backward(work)
    before, behind = sum(kept for kept, *_ in blocks), 0.0
    for kept, deferred, in_input, in_full in reversed(blocks):
        before -= kept
        split = max(split, behind + before + in_input)
        full = max(full, before + in_full)
        behind += deferred
    if blocks:  # when the first block is reached, the head waits for its weight gradient, too
        split = max(split, later - blocks[0][1] + blocks[0][2])
    return {
        "activations": int(activations),
        "deferred": int(later),
        "joined": int(joined_bytes(work)),
        "boundary": int(boundary_bytes(work)),
        "forward": int(activations + max(last, again, in_head)),
        "backward_input": int(max(split, later)),
        "full_backward": int(full),
    }


def _messages(plan: SizedPlan, work: Work, stage: int) -> tuple[float, float]:
    """(bytes per microbatch from its forward to its backward, bytes that are always held) for
    messages, in addition to a message itself.

    DeepSpeed's pipeline engine receives into two permanent buffers, copies inputs out of them
    twice, and keeps outputs (each TP rank has a part of them); the last stage keeps the logits of
    two microbatches (``runtime/pipe/engine.py``: ``pipe_buffers``).
    """
    if not work.program.pipe_buffers:
        return 0.0, 0.0
    part = boundary_bytes(work) / work.tp
    receives, sends = stage > 0, stage < plan.schedule.num_stages - 1
    buffers = part * (receives + sends)
    if not sends:
        outputs = min(2, plan.num_microbatches)
        buffers += outputs * logits_bytes(work, element_bytes(work.precision))
    return part * ((receives and work.tp == 1) + sends), buffers


# The share of the memory reserved by torch's allocator that is lost to fragmentation: 15 % on
# average over eight language models on A100 (GMLake, arXiv 2401.08156). With expandable segments 6
# and 8 % of FSDP2's ranks on an H100 (results/reference/one_gpu, lone_a_fsdp and lone_l_fsdp).
_FRAGMENTS, _EXPANDABLE_FRAGMENTS = 0.15, 0.07


def reserved_bytes(peak_bytes: int, program: Program) -> float:
    """What torch's allocator reserves for tensors that take ``peak_bytes`` at their peak."""
    lost = _EXPANDABLE_FRAGMENTS if program.expandable_segments else _FRAGMENTS
    return peak_bytes / (1 - lost)
