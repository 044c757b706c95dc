"""The price of a plan on a cluster: what the simulator asks of the cost model.

``price_plan`` reads only the plan's sizes and its schedule's name, counts and placement, never its
programs, so that the tuner can price a plan before it builds one. Equal blocks are priced once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import pairwise
from typing import TYPE_CHECKING

from zeropp.cluster import Cluster
from zeropp.cost.blocks import TENSORS, PassTimes, PieceTimes, Work, piece_times
from zeropp.cost.collectives import (
    Group,
    all_reduce_s,
    axis_stride,
    crosses_nodes,
    gather_s,
    group,
    group_of,
    transfer_s,
)
from zeropp.cost.compute_limit import compute_limit
from zeropp.cost.flops import piece_parameters
from zeropp.cost.kernels import element_bytes, stream_s
from zeropp.cost.plan_price import PlanPrice, StageExtras, StageMemory
from zeropp.cost.stage_memory import (
    optimizer_shards,
    sends_compute_type,
    shares_ends,
    stage_memory,
    zero1_ranks,
)
from zeropp.programs import Program, program_named
from zeropp.schedule.program import StageCost

if TYPE_CHECKING:
    from zeropp.plan import Plan

# About 0.5 % of machines take about 10 % more time for equal work (MegaScale, arXiv 2402.15627, as
# remembered: its text was not at hand), and a synchronous step waits for the slowest.
SLOW_NODES = 0.005
SLOW_NODE_LOSS = 0.1


def price_plan(plan: Plan, cluster: Cluster, program: Program | None = None) -> PlanPrice:
    """Durations (seconds) and bytes of a plan. ``program``: a variant of the plan's own, which is
    the registered one by default."""
    work = work_of(plan, cluster, program)
    program = work.program
    tensor = tensor_times(plan, cluster, work)
    job = _Job(plan, cluster, work, tensor, *_piece_times(work, tensor))
    like = _first_alike(plan, cluster)
    first = {s: _priced_stage(job, s) for s in set(like)}
    stages = [first[s] for s in like]
    by_rank: list[list[int]] = [[] for _ in range(max(plan.schedule.stage_rank) + 1)]
    for stage, rank in enumerate(plan.schedule.stage_rank):
        by_rank[rank].append(stage)
    parameters = [sum(stages[s].parameters for s in mine) for mine in by_rank]
    pieces = [sum(len(plan.pieces_of(s)) for s in mine) for mine in by_rank]
    world = plan.layout.world
    limit = compute_limit(plan.shape, cluster, world, plan.precision).tokens_per_s_per_gpu
    return PlanPrice(
        stages=tuple(stage.cost for stage in stages),
        extras=tuple(stage.extras for stage in stages),
        replica_s=tuple(stage.replica_s for stage in stages),
        finish_s=tuple(_finish_s(job, r, parameters[r]) for r in range(len(by_rank))),
        gather_updated_s=tuple(map(partial(_gather_updated_s, job), parameters, pieces)),
        memory=tuple(stage.memory for stage in stages),
        shared_ends=shares_ends(plan, program),
        gathers_ahead=program.flat_chunks or (plan.layout.shard > 1 and not program.fsdp_root),
        torch_runtime=program.torch_stages,
        steps_overlap=program.post_validation,
        resident_gradients=program.resident_gradients,
        flat_chunks=program.flat_chunks,
        stragglers=stragglers(cluster, world),
        overlap_slowdown=cluster.device.overlap_slowdown,
        limit_s=plan.global_batch * plan.shape.seq / (world * limit),
    )


def work_of(plan: Plan, cluster: Cluster, program: Program | None = None) -> Work:
    """What a plan's pieces are priced for; ``program`` as for ``price_plan``."""
    return Work(
        plan.shape,
        cluster.device,
        program or program_named(plan.program),
        plan.precision,
        plan.recompute,
        plan.microbatch_size,
        plan.layout.tp,
        plan.layout.sequence_parallel,
    )


@dataclass(frozen=True)
class _Job:
    """What all stages of one plan are priced with. ``plain``: without recomputation; ``fused``:
    with weight gradients that are added inside their product."""

    plan: Plan
    cluster: Cluster
    work: Work
    tensor: TensorTimes
    times: PieceTimes
    plain: PieceTimes
    fused: PieceTimes


@dataclass(frozen=True)
class _PricedStage:
    cost: StageCost
    extras: StageExtras
    replica_s: float
    memory: StageMemory
    parameters: float  # on one rank, before ZeRO


@lru_cache(maxsize=4096)
def _piece_times(work: Work, tensor: TensorTimes) -> tuple[PieceTimes, PieceTimes, PieceTimes]:
    """A program's own pieces, those without recomputation, and those with fused accumulation."""
    ideal = replace(work.program, fused_accumulation=True)
    variants = (work, replace(work, recompute="none"), replace(work, program=ideal))
    times = [piece_times(variant, tensor.forward, tensor.backward) for variant in variants]
    return times[0], times[1], times[2]


def _first_alike(plan: Plan, cluster: Cluster) -> list[int]:
    """For each stage the first one that has the same price: the same pieces, and neighbours at
    the same distance. Most stages are alike, and pricing them once saves most of the time."""
    ranks, last = plan.schedule.stage_rank, plan.shape.num_pieces
    hops: list[int | None] = [None]
    for here, there in pairwise(ranks):
        hops.append((here != there) + crosses_nodes(cluster, plan.layout, here, there))
    hops.append(None)
    first: dict[tuple[object, ...], int] = {}
    like = []
    for stage, (begin, end) in enumerate(pairwise(plan.cuts)):
        where = (begin == 0, end == last, hops[stage], hops[stage + 1])
        key = (end - begin, plan.recomputed_blocks(stage), *where)
        like.append(first.setdefault(key, stage))
    return like


def _priced_stage(job: _Job, stage: int) -> _PricedStage:
    parameters = stage_parameters(job.plan, stage)
    cost = _stage_cost(job, stage)
    return _PricedStage(
        cost,
        _extras(job, stage),
        _replica_s(job, stage, cost, parameters),
        stage_memory(job.plan, job.work, stage),
        parameters,
    )


def stragglers(cluster: Cluster, world: int) -> float:
    """Factor on the compute of a job of ``world`` GPUs: expected time of its slowest node over that
    of one node, on which the constants were measured."""
    others = -(-world // cluster.gpus_per_node) - 1
    return 1.0 + SLOW_NODE_LOSS * (1.0 - (1.0 - SLOW_NODES) ** others)


def stage_parameters(plan: Plan, stage: int) -> float:
    """Parameters of a stage on one rank, before ZeRO."""
    pieces = plan.pieces_of(stage)
    return sum(piece_parameters(plan.shape, i) for i in pieces) / plan.layout.tp


@dataclass(frozen=True)
class TensorTimes:
    """Seconds of tensor-parallel collectives, one microbatch: ``one`` of a boundary, and of a
    block's forward, backward and recomputation."""

    one: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    again: float = 0.0


def tensor_times(plan: Plan, cluster: Cluster, work: Work) -> TensorTimes:
    """Tensor-parallel collectives.

    Two all-reduces of a boundary each way (arXiv 1909.08053, section 3); under sequence
    parallelism a reduce-scatter and an all-gather take the place of each (arXiv 2205.05198,
    section 4.2.2), and the backward gathers the inputs of both column-parallel products again,
    hidden behind a product but for the slowdown.
    """
    if plan.layout.tp == 1:
        return TensorTimes()
    size = work.tokens * work.shape.hidden * element_bytes(work.precision)
    among = group_of(cluster, plan.layout, "tp")
    one, more = all_reduce_s(cluster, among, size), 0.0
    if work.sequence_parallel:
        half = gather_s(cluster, among, size)
        one, more = 2 * half, 2 * half * cluster.device.overlap_slowdown
    if (
        work.program.overlap_tensor and work.sequence_parallel
    ):  # the first slice is exposed, the others slow products
        one *= 1 / plan.layout.tp + cluster.device.overlap_slowdown
    again = 2 * one if plan.recompute == "full" else 0.0
    return TensorTimes(one, 2 * one, 2 * one + more, again)


def _extras(job: _Job, stage: int) -> StageExtras:
    """What a stage's durations include beside the model's kernels. The embedding and the head add
    one tensor-parallel collective each way."""
    plan, tensor = job.plan, job.tensor
    blocks, ends = _kinds(plan, stage)
    repeated = plan.recomputed_blocks(stage)
    unfused = _backward_s(plan, stage, job.times) - _backward_s(plan, stage, job.fused)
    again = job.times.block.backward_input - job.plain.block.backward_input - tensor.again
    blocking = job.work.program.blocking_transfers
    return StageExtras(
        tensor_forward=blocks * tensor.forward + ends * tensor.one,
        tensor_backward=blocks * tensor.backward + repeated * tensor.again + ends * tensor.one,
        transfer_forward=_transfer_s(job, stage) if blocking else 0.0,
        transfer_backward=_transfer_s(job, stage - 1) if blocking else 0.0,
        recomputation=repeated * again,
        accumulation=unfused,
    )


def _backward_s(plan: Plan, stage: int, times: PieceTimes) -> float:
    """Input and weight gradients of a stage."""
    blocks, _ = _kinds(plan, stage)
    held = [(blocks, times.block)] + [(1, piece) for piece in _ends_of(plan, stage, times)]
    return sum(count * (piece.backward_input + piece.backward_weight) for count, piece in held)


def _ends_of(plan: Plan, stage: int, times: PieceTimes) -> list[PassTimes]:
    """The embedding's and the head's times, where a stage holds them."""
    first, last = plan.cuts[stage], plan.cuts[stage + 1]
    embedding = [times.embedding] if first == 0 else []
    return embedding + ([times.head] if last == plan.shape.num_pieces else [])


def _kinds(plan: Plan, stage: int) -> tuple[int, int]:
    """Blocks of a stage, and how many of embedding and head it holds."""
    blocks = plan.blocks_of(stage)
    return blocks, len(plan.pieces_of(stage)) - blocks


def _stage_cost(job: _Job, stage: int) -> StageCost:
    plan, tensor, times = job.plan, job.tensor, job.times
    blocks, ends = _kinds(plan, stage)
    repeated = plan.recomputed_blocks(stage)
    forward = blocks * times.block.forward + ends * tensor.one
    input_ = (blocks - repeated) * job.plain.block.backward_input + ends * tensor.one
    input_ += repeated * times.block.backward_input
    weight = blocks * times.block.backward_weight
    for piece in _ends_of(plan, stage, times):
        forward += piece.forward
        input_ += piece.backward_input
        weight += piece.backward_weight
    transfer = _transfer_s(job, stage)
    if job.work.program.blocking_transfers:
        forward, transfer = forward + transfer, 0.0
        input_ += _transfer_s(job, stage - 1)
    return StageCost(forward, input_, weight, transfer=transfer, **_shard_s(job, stage))


def _shard_s(job: _Job, stage: int) -> dict[str, float]:
    """Gather and reduction of a stage, one collective per piece or, where a chunk is flat, one in
    all; shards that are cast before their gather, on its own stream; and what stands on the compute
    stream: FSDP2's copies, or the clearing of a flat buffer. On one shard (bf16 copies of fp32
    masters) casts and copies are all."""
    plan, cluster, work = job.plan, job.cluster, job.work
    if not plan.gathers:
        return {}
    among = group_of(cluster, plan.layout, "shard")
    sizes = [piece_parameters(plan.shape, i) / plan.layout.tp for i in plan.pieces_of(stage)]
    if work.program.flat_chunks:
        sizes = [sum(sizes)]
    wire = {"unshard": element_bytes(plan.precision), "reduce_grad": sent_bytes(plan, work.program)}
    seconds = {
        name: sum(gather_s(cluster, among, size * bytes_) for size in sizes)
        for name, bytes_ in wire.items()
    }
    casts = work.program.state(plan.precision).casts_parameters
    if casts and not sends_compute_type(plan, work.program):
        cast = (4 + 2) * sum(sizes) / plan.layout.shard
        seconds["unshard"] += stream_s(work.device, cast, len(sizes))
    if work.program.shard_copies:  # every byte is read once and written once
        for copy, name in (("copy_out", "unshard"), ("copy_in", "reduce_grad")):
            seconds[copy] = stream_s(work.device, 2 * sum(sizes) * wire[name], 2 * len(sizes))
    if work.program.flat_chunks:  # the fp32 buffer of gradients is cleared for every reduction
        seconds["copy_in"] = stream_s(work.device, 4 * sum(sizes), len(sizes))
    return seconds


def sent_bytes(plan: Plan, program: Program) -> int:
    """Bytes of a gradient on the wire: what the program sends, or what the plan asks for."""
    return 2 if plan.reduce_dtype == "bf16" else program.state(plan.precision).reduced


def _transfer_s(job: _Job, stage: int) -> float:
    """A boundary between a stage and the next; before the first and after the last there is none.
    Where the shard group's collectives use the same network, it gets half of it beside them."""
    plan, cluster, work = job.plan, job.cluster, job.work
    ranks, other = plan.schedule.stage_rank, stage + 1
    if stage < 0 or other == len(ranks):
        return 0.0
    size = float(work.tokens * work.shape.hidden * element_bytes(work.precision))
    tp = plan.layout.tp
    if plan.layout.shard > 1:
        shards_cross = group_of(cluster, plan.layout, "shard").nodes > 1
        if shards_cross == crosses_nodes(cluster, plan.layout, ranks[stage], ranks[other]):
            size *= 2
    split = tp if work.sequence_parallel or work.program.split_boundary else 1
    sent = transfer_s(cluster, plan.layout, ranks[stage], ranks[other], size / split)
    if split > 1 and not work.sequence_parallel:
        sent += gather_s(cluster, group_of(cluster, plan.layout, "tp"), size)
    return sent


def _replica_s(job: _Job, stage: int, cost: StageCost, parameters: float) -> float:
    """Reduction of a stage's gradients over the replicas, as far as nothing hides it."""
    plan, cluster, work = job.plan, job.cluster, job.work
    replicas = group_of(cluster, plan.layout, "replicate")
    if replicas.size == 1:
        return 0.0
    total = parameters / plan.layout.shard * sent_bytes(plan, work.program)
    scatters = (
        plan.layout.replicate_zero and not work.program.state(plan.precision).zero1_all_reduces
    )
    reduce = gather_s if scatters else all_reduce_s
    seconds = reduce(cluster, replicas, total)
    if work.program.overlap_reduction:
        hidden = cost.backward_input + cost.backward_weight
        exposed = max(seconds - hidden, seconds / max(1, len(plan.pieces_of(stage))))
        seconds = _slowed(cluster, seconds, exposed)
    return seconds


def _slowed(cluster: Cluster, seconds: float, exposed: float) -> float:
    """What a collective costs whose other part runs beside compute and slows it."""
    return exposed + cluster.device.overlap_slowdown * (seconds - exposed)


def _gather_updated_s(job: _Job, parameters: float, pieces: int) -> float:
    """ZeRO-1: gather a rank's updated parameters over the replicas that split them."""
    plan, cluster, work = job.plan, job.cluster, job.work
    ranks = zero1_ranks(plan.layout, work.program)
    if ranks == 1:
        return 0.0
    stride = axis_stride(plan.layout, "replicate")
    among = group(cluster, ranks, stride, plan.layout.world)
    masters = work.program.state(plan.precision).casts_parameters  # what is updated is what is sent
    cast = sends_compute_type(plan, work.program)  # once per step, where it has been updated
    part = parameters / plan.layout.shard
    each = 4 if masters and not cast else element_bytes(plan.precision)
    seconds = gather_s(cluster, among, part * each)
    if cast:
        seconds += stream_s(cluster.device, (4 + 2) * part / ranks, pieces)
    if work.program.updated == "broadcasts":  # each goes round the whole ring by itself
        seconds += (ranks - 1) * gather_s(cluster, among, 0.0)
    elif work.program.updated == "slices":
        copies = TENSORS[plan.shape.family] * pieces * ranks
        seconds += copies * cluster.device.launch_us * work.program.launch_factor * 1e-6
    if work.program.overlap_updated:  # all but the first piece's behind the next forward
        seconds = _slowed(cluster, seconds, seconds / pieces)
    return seconds


def _finish_s(job: _Job, pipeline_rank: int, parameters: float) -> float:
    """Optimizer step, the tied embedding's all-reduce, host work. Adam reads gradient, master and
    two moments and writes all but the first; unscaling reads and writes gradients, the norm reads
    and the next step clears them."""
    plan, cluster, work = job.plan, job.cluster, job.work
    updated = parameters / optimizer_shards(plan.layout, work.program)
    moved = updated * (4 + 2 * 12 + element_bytes(plan.precision) + 16)
    seconds = stream_s(cluster.device, moved, kernels=4) + work.program.step_host_s
    first_or_last = pipeline_rank in (plan.schedule.stage_rank[0], plan.schedule.stage_rank[-1])
    if plan.shape.tied_embeddings and plan.layout.pp > 1 and first_or_last:
        size = plan.shape.vocab * plan.shape.hidden / plan.layout.tp / plan.layout.shard * 4
        seconds += all_reduce_s(cluster, _ends(plan, cluster), size)
    return seconds


def _ends(plan: Plan, cluster: Cluster) -> Group:
    """The first and the last pipeline rank."""
    whole = group_of(cluster, plan.layout, "pp")
    return Group(2, min(2, whole.nodes), whole.rate)
