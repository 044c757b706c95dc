"""The price of a plan on a cluster.

``price_plan`` reads the plan's sizes and its schedule's name, counts and placement, but never its
programs, so that the tuner can price a plan before it builds them. Equal blocks are priced once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from statistics import NormalDist
from typing import TYPE_CHECKING

from zeropp.cluster import NEWEST, Cluster, Device
from zeropp.cost.communication import (
    TensorTimes,
    crosses_nodes,
    finish_s,
    gather_s,
    gather_updated_s,
    group_of,
    replica_s,
    shard_s,
    stage_parameters,
    tensor_times,
    transfer_s,
)
from zeropp.cost.flops import parameter_count
from zeropp.cost.kernels import ALIGNED, PassTimes, PieceTimes, Work, element_bytes, piece_times
from zeropp.cost.memory import block_kept, head_kept, shares_ends, stage_memory
from zeropp.cost.plan_price import PlanPrice, StageExtras, StepBytes, StepTimes
from zeropp.layout import Layout
from zeropp.literals import Precision
from zeropp.programs import Program, StateBytes, program_named
from zeropp.schedule.program import StageCost
from zeropp.shape import ModelShape

if TYPE_CHECKING:
    from zeropp.plan import SizedPlan


# The compute limit: the throughput of a device if only the model's own kernels took time.
#
# No program reaches it. It leaves out pipeline bubbles, communication, copies of parameters and
# gradients, recomputation, the optimizer, and differences between stages or nodes. It includes what
# no program can avoid on a device: matrix products at the rate that they reach, attention, element-
# wise kernels, the addition of each weight gradient to its sum (in the product), and the time to
# start kernels. So the difference between a plan and the limit is the cost of parallel training.


MICROBATCHES = (1, 2, 4, 8, 16)  # sequences; the sizes that the tuner tries
# The least share of 1F1B's activations with which a pipeline without bubble is known (V-Min: arXiv
# 2405.15362, section 3). 1F1B's are those of one microbatch in the whole model.
LEAST_ACTIVATIONS = 1 / 3
STATE_BYTES = 16  # per parameter: gradient, and the optimizer's fp32 master and two moments
# Fused attention and fused accumulation of fp32 gradient sums.
_IDEAL = Program(
    name="compute limit",
    bf16=StateBytes(4, 4, 8),
    fp32=StateBytes(4, 4, 8),
    fused_loss=True,
    kernels=NEWEST,
)


@dataclass(frozen=True)
class ComputeLimit:
    """The limit of one model on one device, and the microbatch, in sequences, that reaches it."""

    microbatch_size: int
    tokens_per_s_per_gpu: float


@lru_cache(maxsize=1024)
def compute_limit(
    shape: ModelShape, cluster: Cluster, num_gpus: int, precision: Precision
) -> ComputeLimit:
    """Tokens per second and GPU of the model's kernels alone, at the best microbatch that fits.

    A microbatch fits if a device can hold its share of parameters, gradients and optimizer state,
    divided among all GPUs, and the least activations with which a pipeline can run without a
    bubble. One sequence always counts as fitting, because programs can split it (tensor
    parallelism) or keep less of it (recomputation). The kernels are those of
    ``zeropp.cost.kernels``, as fast as the newest software has them, and the vocabulary is padded
    so that its products are not slower than their neighbours'.
    """
    shape = replace(shape, vocab=-(-shape.vocab // ALIGNED) * ALIGNED)
    works = [
        Work(
            shape=shape,
            device=cluster.device.of_year(NEWEST),
            program=_IDEAL,
            precision=precision,
            recompute="none",
            microbatch=size,
            tp=1,
            sequence_parallel=False,
        )
        for size in MICROBATCHES
    ]
    fitting = [w for w in works if w.microbatch == 1 or _fits(w, cluster.device, num_gpus)]
    best = max(fitting, key=_tokens_per_s)
    return ComputeLimit(best.microbatch, _tokens_per_s(best))


def _fits(work: Work, device: Device, num_gpus: int) -> bool:
    states = STATE_BYTES * parameter_count(work.shape) / num_gpus
    activations = work.shape.layers * block_kept(work) + head_kept(work)
    return states + LEAST_ACTIVATIONS * activations <= device.usable_bytes


def _tokens_per_s(work: Work) -> float:
    times = piece_times(work, 0.0, 0.0)
    whole = work.shape.layers * times.block.total + times.embedding.total + times.head.total
    return work.tokens / whole


def equally_priced(plan: SizedPlan, cluster: Cluster) -> tuple[int, ...]:
    """For each stage, the first stage with the same price, that is with the same pieces and with
    neighbours at the same distance. Most stages are equal, so that few have to be priced."""
    hops = _hops(cluster, plan.layout, plan.schedule.stage_rank)
    return _first(plan.cuts, plan.shape.num_pieces, plan.recomputed_per_stage, hops)


@lru_cache(maxsize=4096)
def _hops(cluster: Cluster, layout: Layout, ranks: tuple[int, ...]) -> tuple[int, ...]:
    """How far every stage is from the one before: 0 on the same rank, 1 on the same node, else 2;
    -1 before the first stage and after the last."""
    far = {
        (here, there): (here != there) + crosses_nodes(cluster, layout, here, there)
        for here, there in set(pairwise(ranks))
    }
    return (-1, *(far[pair] for pair in pairwise(ranks)), -1)


@lru_cache(maxsize=4096)
def _first(
    cuts: tuple[float, ...], pieces: int, recomputed: tuple[int, ...], hops: tuple[int, ...]
) -> tuple[int, ...]:
    first: dict[tuple[object, ...], int] = {}
    like = []
    for stage, (begin, end) in enumerate(pairwise(cuts)):
        where = (begin == 0, end == pieces, hops[stage], hops[stage + 1])
        key = (end - begin, begin % 1, recomputed[stage], *where)
        like.append(first.setdefault(key, stage))
    return tuple(like)


# The standard deviation of nodes' compute times over their mean; a step waits for the slowest node.
NODE_SPREAD = 0.015


def price_plan(plan: SizedPlan, cluster: Cluster, program: Program | None = None) -> PlanPrice:
    """The durations (seconds) and bytes of a plan. ``program`` replaces the registered program that
    the plan names, for variants of it."""
    times, held = time_plan(plan, cluster, program), plan_bytes(plan, cluster, program)
    return PlanPrice(**vars(times), **vars(held))


def time_plan(plan: SizedPlan, cluster: Cluster, program: Program | None = None) -> StepTimes:
    """The durations (seconds) of a plan; ``program`` as in ``price_plan``."""
    work = work_of(plan, cluster, program)
    stages = _timed_stages(plan, cluster, work)
    by_rank = [plan.schedule.stages_of(rank) for rank in range(plan.schedule.num_ranks)]
    parameters = [sum(stages[s].parameters for s in mine) for mine in by_rank]
    world = plan.layout.world
    limit = compute_limit(plan.shape, cluster, world, plan.precision).tokens_per_s_per_gpu
    return StepTimes(
        stages=tuple(stage.cost for stage in stages),
        extras=tuple(stage.extras for stage in stages),
        replica_s=tuple(stage.replica_s for stage in stages),
        finish_s=tuple(
            finish_s(plan, cluster, work, pipeline_rank=rank, parameters=held)
            for rank, held in enumerate(parameters)
        ),
        gather_updated_s=tuple(
            gather_updated_s(plan, cluster, work, stages=mine, parameters=held)
            for mine, held in zip(by_rank, parameters, strict=True)
        ),
        steps_overlap=work.program.post_validation,
        stragglers=stragglers(cluster, world),
        overlap_slowdown=cluster.device.overlap_slowdown,
        limit_s=plan.global_batch * plan.shape.seq / (world * limit),
    )


def plan_bytes(plan: SizedPlan, cluster: Cluster, program: Program | None = None) -> StepBytes:
    """The bytes of a plan's stages; ``program`` as in ``price_plan``."""
    work = work_of(plan, cluster, program)
    program = work.program
    like = equally_priced(plan, cluster)
    first = {s: stage_memory(plan, work, s) for s in set(like)}
    return StepBytes(
        memory=tuple(first[s] for s in like),
        shared_ends=shares_ends(plan, program),
        gathers_ahead=program.flat_chunks or (plan.layout.shard > 1 and not program.fsdp_root),
        torch_runtime=program.torch_stages,
        resident_gradients=program.resident_gradients,
        flat_chunks=program.flat_chunks,
    )


def _timed_stages(plan: SizedPlan, cluster: Cluster, work: Work) -> list[_TimedStage]:
    """The durations of every stage; stages that are alike are priced once."""
    tensor = tensor_times(plan, cluster, work)
    times, plain, fused = _piece_times(work, tensor)
    job = _Job(
        plan=plan, cluster=cluster, work=work, tensor=tensor, times=times, plain=plain, fused=fused
    )
    like = equally_priced(plan, cluster)
    first = {s: _timed_stage(job, s) for s in set(like)}
    return [first[s] for s in like]


def work_of(plan: SizedPlan, cluster: Cluster, program: Program | None = None) -> Work:
    """Everything on which the price of a plan's pieces depends; ``program`` as in
    ``price_plan``."""
    program = program or program_named(plan.program)
    return Work(
        shape=plan.shape,
        device=cluster.device.of_year(program.kernels),
        program=program,
        precision=plan.precision,
        recompute=plan.recompute,
        microbatch=plan.microbatch_size,
        tp=plan.layout.tp,
        sequence_parallel=plan.layout.sequence_parallel,
    )


@dataclass(frozen=True, kw_only=True)
class _Job:
    """What the prices of all stages of one plan share. ``plain`` are times without recomputation,
    ``fused`` those with weight gradients that are added in their product."""

    plan: SizedPlan
    cluster: Cluster
    work: Work
    tensor: TensorTimes
    times: PieceTimes
    plain: PieceTimes
    fused: PieceTimes


@dataclass(frozen=True, kw_only=True)
class _TimedStage:
    cost: StageCost
    extras: StageExtras
    replica_s: float
    parameters: float  # on one rank, without ZeRO


@lru_cache(maxsize=4096)
def _piece_times(work: Work, tensor: TensorTimes) -> tuple[PieceTimes, PieceTimes, PieceTimes]:
    """(times of the plan's pieces, those without recomputation, those with fused accumulation)."""
    ideal = replace(work.program, fused_accumulation=True)
    variants = (work, replace(work, recompute="none"), replace(work, program=ideal))
    times = [piece_times(variant, tensor.forward, tensor.backward) for variant in variants]
    return times[0], times[1], times[2]


def _timed_stage(job: _Job, stage: int) -> _TimedStage:
    plan, cluster, work = job.plan, job.cluster, job.work
    cost = _stage_cost(job, stage)
    return _TimedStage(
        cost=cost,
        extras=_extras(job, stage),
        replica_s=replica_s(plan, cluster, work, stage=stage, cost=cost),
        parameters=stage_parameters(plan, stage),
    )


def stragglers(cluster: Cluster, world: int) -> float:
    """The factor on the compute of a job of ``world`` GPUs: the expected time of its slowest node,
    divided by that of a single node, on which the constants were measured. Compute times are taken
    for normally distributed; the expected largest of n is Blom's approximation (1958)."""
    nodes = -(-world // cluster.gpus_per_node)
    return 1.0 + NODE_SPREAD * NormalDist().inv_cdf((nodes - 0.375) / (nodes + 0.25))


def _extras(job: _Job, stage: int) -> StageExtras:
    """What a stage's durations include in addition to the model's kernels. The embedding and the
    head each add one tensor-parallel collective to the forward and one to the backward."""
    plan, tensor = job.plan, job.tensor
    blocks = plan.blocks_of(stage) + len(plan.halves_of(stage)) / 2
    ends = len(_ends_of(plan, stage, job.times))
    logits = tensor.logits * (plan.cuts[stage + 1] == plan.shape.num_pieces)
    repeated = plan.recomputed_blocks(stage)
    unfused = _backward_s(plan, stage, job.times) - _backward_s(plan, stage, job.fused)
    again = job.times.block.backward_input - job.plain.block.backward_input - tensor.again
    blocking = job.work.program.blocking_transfers
    return StageExtras(
        tensor_forward=blocks * tensor.forward + ends * tensor.one + logits,
        tensor_backward=blocks * tensor.backward + repeated * tensor.again + ends * tensor.one,
        transfer_forward=_transfer_s(job, stage) if blocking else 0.0,
        transfer_backward=_transfer_s(job, stage - 1) if blocking else 0.0,
        recomputation=repeated * again,
        accumulation=unfused,
    )


def _backward_s(plan: SizedPlan, stage: int, times: PieceTimes) -> float:
    """Seconds of the input and weight gradients of a stage; all of its blocks are recomputed, or
    none."""
    held = [(plan.blocks_of(stage), times.block)]
    held += [(1, part) for part in _single_parts(plan, stage, times)]
    return sum(count * (part.backward_input + part.backward_weight) for count, part in held)


def _ends_of(plan: SizedPlan, stage: int, times: PieceTimes) -> list[PassTimes]:
    """The times of embedding and head, if the stage has them."""
    first, last = plan.cuts[stage], plan.cuts[stage + 1]
    embedding = [times.embedding] if first == 0 else []
    return embedding + ([times.head] if last == plan.shape.num_pieces else [])


def _single_parts(plan: SizedPlan, stage: int, times: PieceTimes) -> list[PassTimes]:
    """The times of everything in a stage that is no whole block."""
    by_half = {"attention": times.attention, "mlp": times.mlp}
    halves = [by_half[half] for _, half in plan.halves_of(stage)]
    return _ends_of(plan, stage, times) + halves


def _stage_cost(job: _Job, stage: int) -> StageCost:
    plan = job.plan
    forward, input_, weight = passes_s(plan, job.work, job.tensor)[stage]
    transfer = _transfer_s(job, stage)
    if job.work.program.blocking_transfers:
        forward, transfer = forward + transfer, 0.0
        input_ += _transfer_s(job, stage - 1)
    shard = shard_s(plan, job.cluster, job.work, stage)
    return StageCost(
        forward=forward, backward_input=input_, backward_weight=weight, transfer=transfer, **shard
    )


def pass_times(plan: SizedPlan, cluster: Cluster) -> tuple[tuple[float, float, float], ...]:
    """As ``passes_s``, for a plan on a cluster."""
    work = work_of(plan, cluster)
    return passes_s(plan, work, tensor_times(plan, cluster, work))


def passes_s(
    plan: SizedPlan, work: Work, tensor: TensorTimes
) -> tuple[tuple[float, float, float], ...]:
    """Seconds of every stage's forward, input gradient and weight gradient, in which transfers, if
    they block compute, are left out."""
    return _passes_s(
        work, tensor, cuts=plan.cuts, blocks=plan.blocks, recomputed=plan.recomputed_per_stage
    )


@lru_cache(maxsize=16384)
def _passes_s(
    work: Work,
    tensor: TensorTimes,
    *,
    cuts: tuple[float, ...],
    blocks: tuple[int, ...],
    recomputed: tuple[int, ...],
) -> tuple[tuple[float, float, float], ...]:
    times, plain, _ = _piece_times(work, tensor)
    found = []
    for (begin, end), count, repeated in zip(pairwise(cuts), blocks, recomputed, strict=True):
        ends = [plain.embedding] * (begin == 0) + [plain.head] * (end == cuts[-1])
        halves = [plain.mlp] * (begin % 1 > 0) + [plain.attention] * (end % 1 > 0)
        outside = len(ends) * tensor.one + tensor.logits * (end == cuts[-1])
        forward = count * times.block.forward + outside
        input_ = (count - repeated) * plain.block.backward_input + len(ends) * tensor.one
        input_ += repeated * times.block.backward_input
        weight = count * times.block.backward_weight
        for part in ends + halves:
            forward += part.forward
            input_ += part.backward_input
            weight += part.backward_weight
        found.append((forward, input_, weight))
    return tuple(found)


def _transfer_s(job: _Job, stage: int) -> float:
    """Seconds of a transfer from a stage to the next; the last stage has none. If the shard group's
    collectives use the same network, the transfer gets half of the bandwidth."""
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
    sent = transfer_s(
        cluster, plan.layout, source=ranks[stage], target=ranks[other], size=size / split
    )
    if split > 1 and not work.sequence_parallel:
        sent += gather_s(cluster, group_of(cluster, plan.layout, "tp"), size)
    return sent
