"""Seconds of what data parallelism adds to a stage: gathers, reductions, ZeRO-1, the optimizer.

A program sends parameters and gradients piece by piece (FSDP2), or a whole chunk's flat buffers at
a time (ZeroPP's engine); ``collectives_of`` says which.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import log2
from typing import TYPE_CHECKING

from zeropp.cluster import Cluster
from zeropp.cost.flops import half_parameters, linear_weights, piece_parameters
from zeropp.cost.kernels import (
    TENSORS,
    Work,
    attention_backward_s,
    attention_s,
    element_bytes,
    stream_s,
)
from zeropp.cost.memory import optimizer_shards, sends_compute_type, zero1_ranks
from zeropp.layout import Layout
from zeropp.literals import Axis, BlockHalf
from zeropp.programs import Program
from zeropp.schedule.program import StageCost
from zeropp.shape import ModelShape

if TYPE_CHECKING:
    from zeropp.plan import SizedPlan


# Seconds of collectives and messages between the ranks of a layout.
#
# The model is that of rings with a latency and a bandwidth (Thakur, Rabenseifner, Gropp 2005,
# section 4): an all-gather or reduce-scatter of S bytes over n ranks moves (n-1)/n S through every
# rank's link, an all-reduce twice that, and every step of the ring costs a hop. An all-reduce may
# also use trees, as NCCL does (Sanders, Speck, Traeff 2009), with a logarithmic number of hops. So
# larger messages reach a higher bandwidth. Between nodes the bottleneck is the node's NICs, which
# all groups across nodes share, because they communicate at the same time.


@dataclass(frozen=True)
class Group:
    """Ranks that communicate: their number, the number of their nodes, and their bus bandwidth."""

    size: int
    nodes: int
    rate: float  # bytes per second through one rank's link (NCCL's bus bandwidth)


def axis_stride(layout: Layout, axis: Axis) -> int:
    """The difference of the global ranks of neighbours on an axis; raises KeyError for an axis that
    the layout does not have."""
    stride = 1
    for name, size in reversed(layout.axes):
        if name == axis:
            return stride
        stride *= size
    raise KeyError(axis)


@lru_cache(maxsize=4096)
def group_of(cluster: Cluster, layout: Layout, *axes: Axis) -> Group:
    """The group of one axis, or of several neighbouring axes together."""
    sizes = dict(layout.axes)
    size = 1
    for axis in axes:
        size *= sizes[axis]
    stride = min(axis_stride(layout, axis) for axis in axes)
    return group(cluster, size, stride, layout.world)


def group(cluster: Cluster, size: int, stride: int, world: int) -> Group:
    """The group of ``size`` ranks that are ``stride`` apart, in a job of ``world`` ranks."""
    per_node = min(cluster.gpus_per_node, world)
    local = max(1, min(size, per_node // stride))
    nodes = -(-size // local)
    inside = cluster.intra.rate
    if cluster.group_shares:
        inside *= cluster.group_shares[min(local, len(cluster.group_shares)) - 1]
    if nodes == 1:
        return Group(size, 1, inside)
    share = cluster.nics_per_node * cluster.inter.rate * local / per_node
    return Group(size, nodes, share if local == 1 else min(inside, share))


def gather_s(cluster: Cluster, group: Group, total: float) -> float:
    """Seconds of an all-gather to, or a reduce-scatter of, ``total`` bytes per rank."""
    if group.size == 1:
        return 0.0
    return _start(cluster, group) + _ring_hops(cluster, group) + _moved(group, total)


def all_reduce_s(cluster: Cluster, group: Group, total: float) -> float:
    """Seconds of an all-reduce of ``total`` bytes per rank; inside a node the switch may reduce."""
    if group.size == 1:
        return 0.0
    gain = cluster.reduction_gain if group.nodes == 1 else 1.0
    ring = 2 * _ring_hops(cluster, group)
    local = group.size // group.nodes
    tree = 2 * (local - 1) * cluster.intra.hop_us * 1e-6
    tree += 2 * log2(group.nodes) * cluster.inter.hop_us * 1e-6
    return _start(cluster, group) + min(ring, tree) + 2 * _moved(group, total) / gain


def transfer_s(cluster: Cluster, layout: Layout, *, source: int, target: int, size: float) -> float:
    """Seconds of a message of ``size`` bytes between two pipeline ranks, while all ranks of a node
    send theirs."""
    if source == target:
        return 0.0
    stride = axis_stride(layout, "pp")
    if not crosses_nodes(cluster, layout, source, target):
        rate = group(cluster, 2, stride, layout.world).rate
        return cluster.intra.latency_us * 1e-6 + size / rate
    sharing = min(cluster.gpus_per_node, stride, layout.world)
    rate = min(cluster.inter.rate, cluster.nics_per_node * cluster.inter.rate / sharing)
    return cluster.inter.latency_us * 1e-6 + size / rate


def crosses_nodes(cluster: Cluster, layout: Layout, source: int, target: int) -> bool:
    """Whether two pipeline ranks are on different nodes."""
    stride, node = axis_stride(layout, "pp"), cluster.gpus_per_node
    return (source * stride) // node != (target * stride) // node


def _start(cluster: Cluster, group: Group) -> float:
    return (cluster.intra if group.nodes == 1 else cluster.inter).latency_us * 1e-6


def _ring_hops(cluster: Cluster, group: Group) -> float:
    if group.nodes == 1:
        return (group.size - 1) * cluster.intra.hop_us * 1e-6
    inside = (group.size - group.nodes) * cluster.intra.hop_us
    return (inside + group.nodes * cluster.inter.hop_us) * 1e-6


def _moved(group: Group, total: float) -> float:
    return (group.size - 1) / group.size * total / group.rate


@dataclass(frozen=True, kw_only=True)
class TensorTimes:
    """Seconds of tensor-parallel collectives per microbatch: of ``one`` collective of hidden
    states, of a block's forward, backward and recomputation (``again``), and of the gathering of
    the ``logits``, where the loss is not split."""

    one: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    again: float = 0.0
    logits: float = 0.0


def tensor_times(plan: SizedPlan, cluster: Cluster, work: Work) -> TensorTimes:
    """The exposed seconds of tensor-parallel collectives.

    A block has two all-reduces of its hidden states in the forward and two in the backward (arXiv
    1909.08053, section 3). With sequence parallelism a reduce-scatter and an all-gather replace
    each of them (arXiv 2205.05198, section 4.2.2), and the backward gathers the inputs of both
    column-parallel products again; a product hides that gather, but is slowed by it. Gathered
    logits are copied twice: into one tensor, and to make it contiguous.
    """
    tensor = TensorTimes()
    if plan.layout.tp > 1:
        tensor = _exposed(cluster, group_of(cluster, plan.layout, "tp"), work)
    if work.program.slices == 1:
        return tensor
    forward, backward = _ring_s(cluster, plan.layout, work)
    again = forward if work.recompute == "full" else 0.0
    return replace(
        tensor,
        forward=tensor.forward + forward,
        backward=tensor.backward + backward,
        again=tensor.again + again,
    )


def _ring_s(cluster: Cluster, layout: Layout, work: Work) -> tuple[float, float]:
    """Seconds of a block's forward and backward in which attention waits for the keys and values of
    the other slices of its sequences (ring attention, arXiv 2310.01889), which neighbours pass on
    while attention computes with those before; their gradients go round with them."""
    slices, shape = work.program.slices, work.shape
    among = group(cluster, slices, layout.tp, layout.world)
    held = 2 * work.tokens * shape.kv_heads * shape.head_dim / work.tp
    size = held * element_bytes(work.precision)

    def waits(sent: float, attention: float) -> float:
        message, beside = _start(cluster, among) + sent / among.rate, attention / slices
        hidden = min(message, beside) * cluster.device.overlap_slowdown
        return (slices - 1) * (max(0.0, message - beside) + hidden)

    return waits(size, attention_s(work)), waits(2 * size, attention_backward_s(work))


@lru_cache(maxsize=4096)
def _exposed(cluster: Cluster, among: Group, work: Work) -> TensorTimes:
    size = work.tokens * work.shape.hidden * element_bytes(work.precision)
    one, more = all_reduce_s(cluster, among, size), 0.0
    if work.sequence_parallel:
        half = gather_s(cluster, among, size)
        one, more = 2 * half, 2 * half * cluster.device.overlap_slowdown
    if (
        work.program.overlap_tensor and work.sequence_parallel
    ):  # the first slice is exposed, the others slow products
        one *= 1 / work.tp + cluster.device.overlap_slowdown
    again = 2 * one if work.recompute == "full" else 0.0
    if work.program.split_gate and work.shape.gates == 2 and not work.sequence_parallel:
        more += one
    logits = _logits_s(cluster, among, work)
    return TensorTimes(
        one=one, forward=2 * one, backward=2 * one + more, again=again, logits=logits
    )


def _logits_s(cluster: Cluster, among: Group, work: Work) -> float:
    """Seconds in which the logits of a microbatch are gathered and copied."""
    if work.program.vocab_parallel:
        return 0.0
    size = work.tokens * work.shape.vocab * element_bytes(work.precision)
    return gather_s(cluster, among, size) + stream_s(cluster.device, 4.0 * size, kernels=2)


_FP32 = 4
_ADD = 3 * _FP32  # bytes to add one fp32 number to another: read both, write the sum
_CAST = _FP32 + 2  # bytes to read an fp32 number and to write a 16-bit one


def stage_parameters(plan: SizedPlan, stage: int) -> float:
    """Parameters of a stage on one rank, without ZeRO."""
    return sum(_pieces(plan, stage))


def collectives_of(plan: SizedPlan, program: Program, stage: int) -> list[float]:
    """The parameters (on one rank, without ZeRO) that each collective of a stage moves: one
    collective per piece, or per flat buffer of a chunk. ZeroPP's engine has one buffer for weights
    whose gradients may be delayed, one for other parameters, and one for a parameter that two
    pipeline ranks share (``zeropp/engine/sharding.py``)."""
    pieces = _pieces(plan, stage)
    if not program.flat_chunks:
        return pieces
    shape, weights = plan.shape, float(plan.blocks_of(stage) * linear_weights(plan.shape))
    for _, half in plan.halves_of(stage):
        weights += linear_weights(shape, half)
    ends = {0, shape.num_pieces - 1} & set(plan.pieces_of(stage))
    shared = shape.vocab * shape.hidden if ends and shape.tied_embeddings else 0
    rest = sum(pieces) - weights - shared * len(ends)
    return [size for size in (weights, rest, *[float(shared)] * len(ends)) if size]


def _pieces(plan: SizedPlan, stage: int) -> list[float]:
    """Parameters of a stage's pieces and halves of blocks on one rank."""
    first, last = plan.cuts[stage] == 0, plan.cuts[stage + 1] == plan.shape.num_pieces
    halves = tuple(half for _, half in plan.halves_of(stage))
    sizes = _sizes(plan.shape, plan.blocks_of(stage), (first, last), halves)
    return [size / plan.layout.tp for size in sizes]


@lru_cache(maxsize=4096)
def _sizes(
    shape: ModelShape, blocks: int, ends: tuple[bool, bool], halves: tuple[BlockHalf, ...]
) -> tuple[int, ...]:
    """Parameters of an embedding and a head, if a stage has them (``ends``), and of its blocks and
    halves of blocks."""
    embedding, head = ends
    return (
        *([piece_parameters(shape, 0)] if embedding else []),
        *[piece_parameters(shape, 1)] * blocks,
        *([piece_parameters(shape, shape.num_pieces - 1)] if head else []),
        *(half_parameters(shape, half) for half in halves),
    )


def shard_s(plan: SizedPlan, cluster: Cluster, work: Work, stage: int) -> dict[str, float]:
    """Seconds of a stage's gather and reduction, by the fields of StageCost.

    They include what runs on the streams of these collectives: shards are cast before their gather,
    gradients are cast before their reduction or added to those of earlier units. FSDP2's copies and
    the clearing of a flat buffer take time on the compute stream. With a single shard (bf16 copies
    of fp32 masters) there are only casts and copies.
    """
    if not plan.gathers:
        return {}
    program, shards = work.program, plan.layout.shard
    among = group_of(cluster, plan.layout, "shard")
    sizes = collectives_of(plan, program, stage)
    wire = {"unshard": element_bytes(plan.precision), "reduce_grad": sent_bytes(plan, program)}
    seconds = {
        name: sum(gather_s(cluster, among, size * bytes_) for size in sizes)
        for name, bytes_ in wire.items()
    }
    casts = program.state(plan.precision).casts_parameters
    if casts and not sends_compute_type(plan, program):
        seconds["unshard"] += stream_s(work.device, _CAST * sum(sizes) / shards, len(sizes))
    if program.shard_copies:  # every byte is read once and written once
        for copy, name in (("copy_out", "unshard"), ("copy_in", "reduce_grad")):
            seconds[copy] = stream_s(work.device, 2 * sum(sizes) * wire[name], 2 * len(sizes))
    if program.flat_chunks:  # the fp32 buffer of gradients is cleared for every reduction
        seconds["copy_in"] = stream_s(work.device, _FP32 * sum(sizes), len(sizes))
        if shards > 1:
            several = plan.reduce_every == "unit" and plan.num_units > 1
            seconds["reduce_grad"] += _summing_s(plan, work, sizes, 1 / shards, several=several)
    return seconds


def _summing_s(
    plan: SizedPlan, work: Work, sizes: list[float], part: float, *, several: bool
) -> float:
    """Seconds that a reduction of ``sizes`` gradients, of which ``part`` stays on a rank, takes in
    addition: to cast them if they are sent in 16 bits, and to add the part to that of earlier
    reductions if there are ``several``."""
    moved = sum(sizes) * _CAST * (1 + part) if plan.reduce_dtype == "bf16" else 0.0
    if several:
        moved += sum(sizes) * part * _ADD
    return stream_s(work.device, moved, len(sizes)) if moved else 0.0


def sent_bytes(plan: SizedPlan, program: Program) -> int:
    """Bytes per gradient that a reduction sends, by the program or by the plan's
    ``reduce_dtype``."""
    return 2 if plan.reduce_dtype == "bf16" else program.state(plan.precision).reduced


def replica_s(
    plan: SizedPlan, cluster: Cluster, work: Work, *, stage: int, cost: StageCost
) -> float:
    """Exposed seconds of the reduction of a stage's gradients over the replicas."""
    replicas = group_of(cluster, plan.layout, "replicate")
    if replicas.size == 1:
        return 0.0
    program, layout = work.program, plan.layout
    sizes = [size / layout.shard for size in collectives_of(plan, program, stage)]
    if not program.flat_chunks:
        sizes = [sum(sizes)]
    scatters = layout.replicate_zero and not program.state(plan.precision).zero1_all_reduces
    reduce = gather_s if scatters else all_reduce_s
    sent = sent_bytes(plan, program)
    seconds = sum(reduce(cluster, replicas, size * sent) for size in sizes)
    if program.flat_chunks:
        part = 1 / layout.replicate if scatters else 1.0
        seconds += _summing_s(plan, work, sizes, part, several=False)
    if program.overlap_reduction:
        hidden = cost.backward_input + cost.backward_weight
        exposed = max(seconds - hidden, seconds / len(_pieces(plan, stage)))
        seconds = _slowed(cluster, seconds, exposed)
    return seconds


def _slowed(cluster: Cluster, seconds: float, exposed: float) -> float:
    """The cost of a collective of which ``exposed`` seconds are exposed: these, and the time by
    which the hidden part slows compute."""
    return exposed + cluster.device.overlap_slowdown * (seconds - exposed)


def gather_updated_s(
    plan: SizedPlan, cluster: Cluster, work: Work, *, stages: Sequence[int], parameters: float
) -> float:
    """Exposed seconds in which ZeRO-1 gathers updated parameters of a rank over the replicas."""
    program = work.program
    ranks = zero1_ranks(plan.layout, program)
    if ranks == 1:
        return 0.0
    among = group(cluster, ranks, axis_stride(plan.layout, "replicate"), plan.layout.world)
    masters = program.state(plan.precision).casts_parameters  # the updated masters are sent
    cast = sends_compute_type(plan, program)  # once per step, where it has been updated
    part = parameters / plan.layout.shard
    seconds = gather_s(
        cluster, among, part * (_FP32 if masters and not cast else element_bytes(plan.precision))
    )
    if cast:
        seconds += stream_s(work.device, _CAST * part / ranks, len(stages))
    pieces = sum(len(_pieces(plan, stage)) for stage in stages)
    if program.flat_chunks:
        more = sum(len(collectives_of(plan, program, stage)) for stage in stages) - 1
        seconds += more * gather_s(cluster, among, 0.0)
    if program.updated == "broadcasts":  # each takes all steps of a ring
        seconds += (ranks - 1) * gather_s(cluster, among, 0.0)
    elif program.updated == "slices":
        copies = TENSORS[plan.shape.family] * pieces * ranks
        seconds += copies * cluster.device.launch_us * program.launch_factor * 1e-6
    if program.overlap_updated:  # the next forward hides all but the first piece's
        seconds = _slowed(cluster, seconds, seconds / pieces)
    return seconds


def finish_s(
    plan: SizedPlan, cluster: Cluster, work: Work, *, pipeline_rank: int, parameters: float
) -> float:
    """Seconds of the optimizer step, the tied embedding's all-reduce and host work. Adam reads the
    gradient, the master weight and two moments, and writes all but the gradient; unscaling reads
    and writes gradients, the norm reads them, and the next step clears them."""
    updated = parameters / optimizer_shards(plan.layout, work.program)
    moved = updated * (_FP32 + 2 * 12 + element_bytes(plan.precision) + 16)
    seconds = stream_s(cluster.device, moved, kernels=4) + work.program.step_host_s
    first_or_last = pipeline_rank in (plan.schedule.stage_rank[0], plan.schedule.stage_rank[-1])
    if plan.shape.tied_embeddings and plan.layout.pp > 1 and first_or_last:
        size = plan.shape.vocab * plan.shape.hidden / plan.layout.tp / plan.layout.shard * _FP32
        seconds += all_reduce_s(cluster, _ends(plan, cluster), size)
    return seconds


def _ends(plan: SizedPlan, cluster: Cluster) -> Group:
    """The group of the first and the last pipeline rank."""
    whole = group_of(cluster, plan.layout, "pp")
    return Group(2, min(2, whole.nodes), whole.rate)
