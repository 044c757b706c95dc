"""Bytes of one stage's parameters, gradients and optimizer state on one rank.

They follow arXiv 1910.02054 (section 3.1), with the bytes per parameter that the program keeps.
What FSDP2 gathers, sums and copies follows
``torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py`` and ``_fsdp_param_group.py`` (torch
2.13).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zeropp.cost.activations import FP32
from zeropp.cost.blocks import Work
from zeropp.cost.flops import half_parameters, piece_parameters
from zeropp.cost.kernels import element_bytes
from zeropp.layout import Layout
from zeropp.programs import Program

if TYPE_CHECKING:
    from zeropp.plan import SizedPlan


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
        "gradients": whole * state.gradients / _gradient_shards(plan)
        + whole * state.half_gradients,
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


def _gradient_shards(plan: SizedPlan) -> int:
    """The number of ranks over which the gradients of a step are sharded. With ZeRO-1, gradients
    that are reduced over the replicas per unit are summed only where they are updated."""
    layout = plan.layout
    rows = layout.replicate_zero and plan.replicate_every == "unit"
    return layout.shard * (layout.replicate if rows else 1)


def optimizer_shards(layout: Layout, program: Program) -> int:
    """The number of ranks over which the optimizer state is sharded."""
    return layout.shard * zero1_ranks(layout, program)


def zero1_ranks(layout: Layout, program: Program) -> int:
    """The number of replicas over which ZeRO-1 shards the optimizer state; 1 without ZeRO-1."""
    if program.zero1_group:
        return min(program.zero1_group, layout.replicate)
    return layout.replicate if layout.replicate_zero else 1
