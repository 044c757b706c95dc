"""Seconds of what tensor and data parallelism add to a stage: exposed collectives of TP, gathers,
reductions, ZeRO-1, the optimizer.

A program sends parameters and gradients piece by piece (FSDP2), or a whole chunk's flat buffers at
a time (ZeroPP's engine); ``collectives_of`` says which.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import gcd

from zeropp.price.cluster import Cluster
from zeropp.price.flops import linear_weights, piece_parameters
from zeropp.price.kernels import element_bytes, matmul_s, stream_s
from zeropp.price.memory import (
    gathered_in_8_bits,
    optimizer_shards,
    sends_compute_type,
    zero1_ranks,
)
from zeropp.price.network import (
    Group,
    all_reduce_s,
    all_reduce_waits_s,
    all_to_all_s,
    axis_stride,
    gather_s,
    group,
    group_of,
    hops_s,
    start_s,
    waits_s,
)
from zeropp.price.pieces import (
    Work,
    attention_s,
    gradients_of,
    linears,
    tensors_of,
)
from zeropp.price.programs import Program, gathers, sent_bytes
from zeropp.price.zero3 import persistent_s
from zeropp.schedule.plan import SizedPlan
from zeropp.schedule.program import StageCost
from zeropp.types.frozen import replace
from zeropp.types.layout import Layout
from zeropp.types.shape import ModelShape


@dataclass(frozen=True, kw_only=True)
class TensorTimes:
    """Seconds of tensor-parallel collectives per microbatch: of a ``collective`` of hidden
    states, of a block's forward, backward and recomputation (``again``), and of the gathering of
    the ``logits``, where the loss is not split."""

    collective: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    again: float = 0.0
    logits: float = 0.0


def tensor_times(plan: SizedPlan, cluster: Cluster, work: Work) -> TensorTimes:
    """As ``_tensor_times``, for a plan."""
    return _tensor_times(plan.layout, cluster, work)


@lru_cache(maxsize=4096)
def _tensor_times(layout: Layout, cluster: Cluster, work: Work) -> TensorTimes:
    """The exposed seconds of tensor-parallel collectives, and of those between ranks that divide
    sequences.

    A block has two all-reduces of its hidden states in the forward and two in the backward (arXiv
    1909.08053, section 3). With sequence parallelism a reduce-scatter and an all-gather replace
    each of them (arXiv 2205.05198, section 4.2.2), and the backward gathers the inputs of both
    column-parallel products again, unless the program keeps them; a product hides that gather, but
    is slowed by it, and so it is with the last collective of their input gradients in programs with
    ``overlap_input_gradient``. Gathered logits are copied twice: into one tensor, and to make it
    contiguous.
    """
    tensor = TensorTimes()
    if layout.tp > 1:
        tensor = _exposed(cluster, group_of(cluster, layout, "tp"), work)
    if work.context == 1:
        return tensor
    ring, heads = _ring_s(cluster, layout, work), _heads_s(cluster, layout, work)
    again = {"none": 0.0, "selective": 0.0, "mlp": heads, "full": ring[0] + heads}
    if work.program.selective == "elementwise":  # the outputs of products and of attention are kept
        again["selective"] = heads
    return replace(
        tensor,
        forward=tensor.forward + ring[0] + heads,
        backward=tensor.backward + ring[1] + heads,
        again=tensor.again + again[work.recompute],
    )


def by_heads(plan: SizedPlan, cluster: Cluster) -> int:
    """Of the ranks that divide sequences, those that exchange heads for tokens: all, none (1), or
    as many as share a node."""
    layout = plan.layout
    if layout.exchange == "both":
        return gcd(layout.context, max(1, cluster.gpus_per_node // axis_stride(layout, "context")))
    return layout.context if layout.exchange == "heads" else 1


def _heads_s(cluster: Cluster, layout: Layout, work: Work) -> float:
    """Seconds of a block's forward, or backward, in which attention waits for other tokens of its
    heads: an all-to-all of queries, keys and values, and one of what it gives (arXiv 2309.14509,
    section 3.1), each with a copy before it and one behind it. Keys and values of fewer heads than
    ranks are sent as often as ranks need them."""
    if work.by_heads == 1:
        return 0.0
    shape = work.shape
    among = group(cluster, work.by_heads, axis_stride(layout, "context"), layout.world)
    kv = max(shape.kv_heads // work.tp, work.by_heads) * shape.head_dim
    element = work.tokens * element_bytes(work.precision)
    sizes = (element * (shape.attended / work.tp + 2 * kv), element * shape.attended / work.tp)
    copied = stream_s(cluster.device, 4 * sum(sizes), kernels=4)
    return copied + sum(all_to_all_s(cluster, among, size) for size in sizes)


def _ring_s(cluster: Cluster, layout: Layout, work: Work) -> tuple[float, float]:
    """Seconds of a block's forward and backward in which attention waits for the keys and values of
    the other slices of its sequences (ring attention, arXiv 2310.01889), which neighbours pass on
    while attention computes with those before; their gradients go round with them."""
    slices, shape = work.context // work.by_heads, work.shape
    if slices == 1:
        return 0.0, 0.0
    among = group(cluster, slices, axis_stride(layout, "context") * work.by_heads, layout.world)
    held = 2 * work.tokens * shape.kv_heads * shape.head_dim / work.tp
    size = held * element_bytes(work.precision)

    def waits(sent: float, attention: float) -> float:
        message, beside = start_s(cluster, among) + sent / among.rate, attention / slices
        hidden = min(message, beside) * cluster.device.overlap_slowdown
        return (slices - 1) * (max(0.0, message - beside) + hidden)

    return waits(size, attention_s(work)), waits(2 * size, attention_s(work, backward=True))


@lru_cache(maxsize=4096)
def _exposed(cluster: Cluster, among: Group, work: Work) -> TensorTimes:
    program, slowdown = work.program, cluster.device.overlap_slowdown
    size = work.tokens * work.shape.hidden * element_bytes(work.precision)
    collective = last = all_reduce_s(cluster, among, size)
    more = 0.0
    if work.sequence_parallel:
        last = gather_s(cluster, among, size)
        collective = 2 * last
        if program.copies_slices:  # without a copy if a microbatch is one sequence
            collective += stream_s(cluster.device, 2.0 * size) * (1 + (work.microbatch > 1))
        if not program.keeps_gathered_inputs:
            more = 2 * last * slowdown
    if program.overlap_tensor and work.sequence_parallel:
        # the first slice is exposed, the others slow products
        collective *= 1 / work.tp + slowdown
    elif program.overlap_input_gradient:
        first = 2 + (work.shape.gates if work.program.separate_projections else 1)  # from the end
        products = linears(work)
        weights_s = [
            sum(matmul_s(work.device, work.precision, m=k, k=work.tokens, n=n) for k, n in columns)
            for columns in (products[:-first], products[1 - first : -1])
        ]
        more -= (1 - slowdown) * sum(min(last, seconds) for seconds in weights_s)
    again = {"none": 0.0, "selective": float(program.selective == "mlp"), "mlp": 1.0, "full": 2.0}
    if program.stops_recomputing:  # before the last sum; with slices that is half a collective
        again["full"] -= 0.5 if work.sequence_parallel else 1.0
        again["mlp"] -= 0.5 if work.sequence_parallel else 1.0
    if program.split_gate and work.shape.gates == 2 and not work.sequence_parallel:
        more += collective
    logits = 0.0
    if not program.vocab_parallel:
        size = work.tokens * work.shape.vocab * element_bytes(work.precision)
        logits = gather_s(cluster, among, size) + stream_s(cluster.device, 4.0 * size, kernels=2)
    return TensorTimes(
        collective=collective,
        forward=2 * collective,
        backward=2 * collective + more,
        again=again[work.recompute] * collective,
        logits=logits,
    )


_FP32 = 4
_ADD = 3 * _FP32  # bytes to add one fp32 number to another: read both, write the sum
_CAST = _FP32 + 2  # bytes to read an fp32 number and to write a 16-bit one


def stage_parameters(plan: SizedPlan, stage: int) -> float:
    """Parameters of a stage on one rank, without ZeRO."""
    return sum(_sizes(plan.shape, plan.layout.tp, 0, *plan.cuts[stage : stage + 2]))


def collectives_of(plan: SizedPlan, program: Program, stage: int) -> tuple[float, ...]:
    """The parameters (on one rank, without ZeRO) that each collective of a stage moves: one
    collective per piece, or per flat buffer of a chunk. ZeroPP's engine has one buffer for weights
    whose gradients may be delayed, or several, one for other parameters, and one for a parameter
    that two pipeline ranks share (``zeropp/engine/sharding.py``)."""
    return _sizes(
        plan.shape,
        plan.layout.tp,
        plan.parts_of(stage) if program.flat_chunks else 0,
        *plan.cuts[stage : stage + 2],
    )


@lru_cache(maxsize=16384)
def _sizes(shape: ModelShape, tp: int, parts: int, begin: int, end: int) -> tuple[float, ...]:
    """As ``collectives_of``; without ``parts``, one per piece."""
    pieces = tuple(piece_parameters(shape, piece) / tp for piece in range(begin, end))
    if not parts:
        return pieces
    ends = {0, shape.num_pieces - 1} & {*range(begin, end)}
    weights = float((len(pieces) - len(ends)) * linear_weights(shape))
    shared = shape.vocab * shape.hidden if ends and shape.tied_embeddings else 0
    rest = sum(pieces) - weights - shared * len(ends)
    sizes = (*[weights / parts] * parts, rest, *[float(shared)] * len(ends))
    return tuple(size for size in sizes if size)


def shard_s(plan: SizedPlan, cluster: Cluster, work: Work, stage: int) -> dict[str, float]:
    """Seconds of a stage's gather and reduction, by the fields of StageCost.

    They include what runs on the streams of these collectives: shards are cast before their gather
    (by torch's stages on the compute stream), gradients are cast before their reduction or added to
    those of earlier units. FSDP2's copies and the clearing of a flat buffer take time on the
    compute stream. With a single shard (bf16 copies of fp32 masters) there are only casts and
    copies.
    """
    if not gathers(plan):
        return {}
    program, shards = work.program, plan.layout.shards
    among = group_of(cluster, plan.layout, *plan.layout.shard_axes)
    sizes = collectives_of(plan, program, stage)
    sent, element = sent_bytes(plan, program), element_bytes(plan.precision)
    gathered = [size * element for size in sizes]
    if cast := gathered_in_8_bits(plan, program, stage):
        blocks = range(1, plan.shape.num_pieces - 1)
        gathered = [
            size - (piece in blocks) * cast / plan.blocks[stage]
            for piece, size in zip(plan.pieces_of(stage), gathered, strict=True)
        ]
    seconds = {
        "unshard": sum(gather_s(cluster, among, size) for size in gathered),
        "reduce_grad": sum(gather_s(cluster, among, size * sent) for size in sizes),
    }
    # FSDP2 copies and casts tensor by tensor where nothing is sharded.
    kernels = len(sizes) * (tensors_of(work) if program.fsdp_hooks and shards == 1 else 1)
    if program.shard_copies:  # every byte is read once and written once
        made = program.state(plan.precision).gradients
        if program.fsdp_hooks and (not work.accumulated or plan.sum_dtype == "bf16"):
            made = element  # as autograd has made, or added, them
        seconds["copy_out"] = stream_s(work.device, 2 * sum(gathered), kernels)
        seconds["copy_in"] = stream_s(work.device, sum(sizes) * (made + sent), len(sizes))
        if shards == 1:  # a copy stands for the reduction
            seconds["reduce_grad"] += stream_s(work.device, 2 * sum(sizes) * sent, len(sizes))
    if program.state(plan.precision).casts_parameters and not sends_compute_type(plan, program):
        stream = "copy_out" if program.torch_stages else "unshard"  # which casts
        seconds[stream] += stream_s(work.device, _CAST * sum(sizes) / shards, kernels)
    if program.flat_chunks:  # the fp32 buffer of gradients is cleared for every reduction
        seconds["copy_in"] = stream_s(work.device, _FP32 * sum(sizes), len(sizes))
        if shards > 1:
            several = plan.reduce_every == "unit" and plan.num_units > 1
            seconds["reduce_grad"] += _summing_s(plan, work, sizes, 1 / shards, several=several)
    return seconds


def shard_waits_s(plan: SizedPlan, cluster: Cluster, work: Work, stage: int) -> float:
    """Seconds of a stage's gather, or of its reduction, in which no bytes move."""
    return len(collectives_of(plan, work.program, stage)) * waits_s(
        cluster, group_of(cluster, plan.layout, *plan.layout.shard_axes)
    )


def _summing_s(
    plan: SizedPlan, work: Work, sizes: Sequence[float], part: float, *, several: bool
) -> float:
    """Seconds that a reduction of ``sizes`` gradients takes in addition (``part`` stays on a
    rank): to cast them if they are sent in 16 bits, and to add the part to that of earlier
    reductions if there are ``several``."""
    moved = sum(sizes) * _CAST * (1 + part) if plan.reduce_dtype == "bf16" else 0.0
    if several:
        moved += sum(sizes) * part * _ADD
    return stream_s(work.device, moved, len(sizes)) if moved else 0.0


def replica_s(
    plan: SizedPlan, cluster: Cluster, work: Work, *, stage: int, cost: StageCost
) -> tuple[float, float]:
    """Seconds of the reduction of a stage's gradients over the replicas that begin once the stage
    has no backward left, and those that its own backward hides."""
    replicas = group_of(cluster, plan.layout, *plan.layout.replica_axes)
    if replicas.size == 1:
        return 0.0, 0.0
    program, layout, state = work.program, plan.layout, work.program.state(plan.precision)
    sizes = [size / layout.shards for size in collectives_of(plan, program, stage)]
    first = sizes[0]
    if not program.flat_chunks and not program.fsdp_hooks:
        if stage == 0 and program.updated_bucket > _default_bucket(layout):
            # The last one ends behind the step's last pass. It may be of several pieces.
            every = sum(stage_parameters(plan, each) for each in range(plan.schedule.num_stages))
            first = max(first, min(program.updated_bucket, every / layout.shards))
        sizes = [max(sum(sizes), first)]
    scatters = layout.replicate_zero and not state.zero1_all_reduces
    reduce = gather_s if scatters else all_reduce_s
    sent = sent_bytes(plan, program)
    seconds = sum(reduce(cluster, replicas, size * sent) for size in sizes)
    if program.flat_chunks:
        seconds += _summing_s(
            plan, work, sizes, 1 / layout.replicas if scatters else 1.0, several=False
        )
    bucket = state.bucket if layout.replicate_zero else 0
    if bucket and program.overlap_reduction:
        return _by_bucket_s(plan, cluster, work, stage=stage, cost=cost)
    if bucket:  # each is a collective of its own, or one for every rank with a part of it
        more = sum(sizes) // bucket + (replicas.size if scatters else 0)
        seconds += more * reduce(cluster, replicas, 0.0)
    if state.copied:
        seconds += stream_s(work.device, state.copied * sum(sizes), len(sizes))
    exposed = seconds
    if program.overlap_reduction and not cost.waits_for_reduction:  # the first piece is exposed
        hidden = cost.backward_input + cost.backward_weight
        exposed = max(seconds - hidden, seconds * first / sum(sizes))
    return exposed, seconds - exposed


def _by_bucket_s(
    plan: SizedPlan, cluster: Cluster, work: Work, *, stage: int, cost: StageCost
) -> tuple[float, float]:
    """As ``replica_s``, where DeepSpeed all-reduces the gradients of a stage beside its backward
    (``average_tensor`` of its ``stage_1_and_2.py``).

    A bucket is reduced once the next gradient does not fit into it; a larger one is a bucket of its
    own, and all others are copied into theirs, between the kernels of the backward. Before a
    reduction compute waits for those before it. The backward is divided among the products by
    their size; a bias comes with its matrix, just before it.
    """
    replicas = group_of(cluster, plan.layout, *plan.layout.replica_axes)
    state, sent = work.program.state(plan.precision), sent_bytes(plan, work.program)
    # With ZeRO-2 a backward has copied them already (``StateBytes.accumulated``).
    into = 0 if state.accumulated else 2 * element_bytes(plan.precision)

    def reduced_s(elements: float) -> float:
        copied_s = stream_s(work.device, (state.copied - into) * elements)
        return copied_s + all_reduce_s(cluster, replicas, elements * sent)

    def moving_s(elements: float) -> float:
        whole_s = all_reduce_s(cluster, replicas, elements * sent)
        return whole_s - all_reduce_waits_s(cluster, replicas)

    gradients = gradients_of(plan, work, stage)
    backward_s = cost.backward_input + cost.backward_weight
    each_s = backward_s / sum(map(sum, gradients))
    now = end = held = moving = 0.0
    for together in gradients:
        now += sum(together) * each_s
        for elements in together:
            if held and held + elements > state.bucket:
                now = max(now, end)
                moving += moving_s(held)
                end, held = now + reduced_s(held), 0.0
            held += elements
            if into and elements <= state.bucket:
                now += stream_s(work.device, into * elements)
    exposed = max(now, end) + reduced_s(held) - backward_s
    return exposed, max(0.0, moving + moving_s(held) - exposed)


def gather_updated_s(
    plan: SizedPlan,
    cluster: Cluster,
    work: Work,
    *,
    stages: Sequence[int],
    parameters: float,
    forwards: Sequence[float],
) -> float:
    """Exposed seconds in which ZeRO-1 gathers updated parameters of a rank over the replicas.
    ``forwards`` are the seconds of one microbatch's forward in each of its stages."""
    program = work.program
    ranks = zero1_ranks(plan.layout, program)
    if ranks == 1:
        return 0.0
    among = group_of(cluster, plan.layout, *plan.layout.replica_axes)
    if ranks < among.size:
        among = group(cluster, ranks, axis_stride(plan.layout, "replicate"), plan.layout.world)
    masters = program.state(plan.precision).casts_parameters  # the updated masters are sent
    cast = sends_compute_type(plan, program)  # once per step, where it has been updated
    sent: float = _FP32 if masters and not cast else element_bytes(plan.precision)
    if not masters:
        sent -= sum(gathered_in_8_bits(plan, program, stage) for stage in stages) / parameters
    part = parameters / plan.layout.shards
    if program.overlap_updated:
        sizes, beside = _gathered_ahead(plan, work, stages=stages, forwards=forwards)
        each = [gather_s(cluster, among, size / plan.layout.shards * sent) for size in sizes]
        late = (max(0.0, now - hidden) for now, hidden in zip(each[1:], beside, strict=False))
        exposed = each[0] + sum(late)
        moving = sum(each) - len(each) * waits_s(cluster, among)
        # The hidden part slows compute.
        return exposed + cluster.device.overlap_slowdown * (max(moving, exposed) - exposed)
    seconds = gather_s(cluster, among, part * sent)
    if cast:
        seconds += stream_s(work.device, _CAST * part / ranks, len(stages))
    if program.flat_chunks:
        more = sum(len(collectives_of(plan, program, stage)) for stage in stages) - 1
        seconds += more * gather_s(cluster, among, 0.0)
    if program.updated == "broadcasts":  # each goes once round a ring
        seconds += (ranks - 1) * (start_s(cluster, among) + hops_s(cluster, among))
    elif program.updated == "slices":
        pieces = sum(len(plan.pieces_of(stage)) for stage in stages)
        seconds += tensors_of(work) * pieces * ranks * work.launch_s
    return seconds


def _gathered_ahead(
    plan: SizedPlan, work: Work, *, stages: Sequence[int], forwards: Sequence[float]
) -> tuple[list[float], list[float]]:
    """The parameters that each of Megatron-Core's gathers brings to a rank, in the order in which
    forwards need them, and the seconds of forwards with them before those of the next are needed.

    A gather begins once the one before has been waited for, so that nothing else hides it
    (``finish_param_sync`` of ``core/distributed/param_and_grad_buffer.py``, 0.16.1). One brings a
    bucket; where a rank has several chunks, it brings a chunk (``param_sync_func`` in
    ``core/pipeline_parallel/schedules.py``, with ``align_param_gather``). In a pipeline without
    chunks each rank would begin when its first forward does, one after another, as ranks behind the
    first have one bucket; all at once, before any forward, is faster, and is what is priced.
    """
    if plan.layout.pp == 1:  # in one stage, or in a stage per piece if the host keeps blocks
        least = work.program.updated_bucket or _default_bucket(plan.layout)
        sizes, shares = _buckets(work, plan.shape.layers, least)
        return sizes, [sum(forwards) * share for share in shares]
    sizes = [stage_parameters(plan, stage) for stage in stages]
    together = min(plan.layout.pp, plan.num_microbatches)  # a chunk's forwards before the next
    return sizes, [together * forward for forward in forwards]


def _default_bucket(layout: Layout) -> int:
    """The elements that close a bucket of Megatron-Core (``DistributedDataParallel``), which counts
    replicas without context; they are counted with it here."""
    return max(40_000_000, 1_000_000 * layout.replicas)


@lru_cache(maxsize=4096)
def _buckets(work: Work, blocks: int, least: int) -> tuple[list[float], list[float]]:
    """Parameters of the buckets of a rank that has the whole model, in the order in which forwards
    need them, and the share of a forward between the need of each and that of the next.

    They are filled from the model's end, in the order in which its layers are registered, and
    closed by the parameter that reaches the ``least`` size (``bucket_size``).
    The product after attention is registered before that of queries, keys and values. The forward
    is divided among products by their parameters.
    """
    shape, products = work.shape, [float(k * n) for k, n in linears(work)]
    after = len(products) - 2 - (shape.gates if work.program.separate_projections else 1)
    in_block = [after, *range(after), *range(after + 1, len(products))]
    table = shape.vocab * shape.hidden / work.tp
    head = [] if shape.tied_embeddings else [table]
    needed = [table, *products * blocks, *head]  # in the order of the forward
    registered = [0]
    registered += [1 + len(products) * block + each for block in range(blocks) for each in in_block]
    registered += range(len(registered), len(needed))
    sizes, bucket = [0.0], dict[int, int]()
    for at in reversed(registered):
        if sizes[-1] >= least:
            sizes.append(0.0)
        sizes[-1] += needed[at]
        bucket[at] = len(sizes) - 1
    shares, now, total = [0.0] * len(sizes), len(sizes) - 1, sum(needed[1:])
    for at, size in enumerate(needed[1:], start=1):
        now = min(now, bucket[at])
        shares[now] += size / total
    return sizes[::-1], shares[::-1]


def update_s(plan: SizedPlan, cluster: Cluster, work: Work, *, parameters: float) -> float:
    """Seconds of a rank's optimizer step. Adam reads the gradient, the master weight and two
    moments, and writes all but the gradient, and parameters in the type of compute where they are
    kept; the norm reads gradients, scaling reads and writes them, and the next step clears those
    that stay."""
    program, state = work.program, work.program.state(plan.precision)
    updated = parameters / optimizer_shards(plan.layout, program)
    kept = 0 if state.casts_parameters else element_bytes(plan.precision)
    moved = updated * (_FP32 + 2 * 12 + kept + _FP32)
    if program.live_parameters and plan.layout.shards > 1:
        # Tensor by tensor; and a norm in fp64 (``get_grad_norm_direct``) and a product with the
        # loss's scale (``unscale_and_clip_grads``), for which ZeRO-3 has no switch.
        tensors = sum(gradients_of(plan, work, 0), ())
        gradient = state.gradients
        moved += updated * (_joined_bytes(gradient) + (gradient + 8) + 8 + 2 * _FP32)
        kept_s = persistent_s(plan, cluster, work, tensors)
        return kept_s + stream_s(cluster.device, moved, 4 + 3 * len(tensors))
    if program.joins_gradients and state.gradients == element_bytes(plan.precision):
        moved += updated * _joined_bytes(state.gradients)
    elif program.gradient_passes:
        moved += parameters * program.gradient_passes * state.gradients
    else:
        moved += updated * (2 + program.resident_gradients) * _FP32
    return stream_s(cluster.device, moved, kernels=4)


def _joined_bytes(gradient: int) -> int:
    """Bytes per element that DeepSpeed's ZeRO moves to hand gradients of this many bytes to Adam:
    their scaling, their joining and, if they are not fp32, their cast."""
    return 4 * gradient + (0 if gradient == _FP32 else gradient + _FP32)


def tied_s(plan: SizedPlan, cluster: Cluster) -> float:
    """Seconds of the all-reduce of a tied embedding's gradients between two pipeline ranks."""
    if plan.layout.pp == 1:
        return 0.0
    size = plan.shape.vocab * plan.shape.hidden / plan.layout.tp / plan.layout.shards * _FP32
    whole = group_of(cluster, plan.layout, "pp")
    return all_reduce_s(cluster, Group(2, min(2, whole.nodes), whole.rate), size)
