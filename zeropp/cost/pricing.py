"""The price of a plan on a cluster: what the simulator asks of the cost model.

``price_plan`` reads only the plan's sizes and its schedule's name, counts and placement, never its
programs, so that the tuner can price a plan before it builds one. Equal blocks are priced once.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from zeropp.cost.blocks import Work, piece_times
from zeropp.cost.cluster import Cluster
from zeropp.cost.collectives import (
    Group,
    all_reduce_s,
    axis_stride,
    gather_s,
    group,
    group_of,
    transfer_s,
)
from zeropp.cost.flops import piece_parameters
from zeropp.cost.kernels import element_bytes, stream_s
from zeropp.cost.memory import optimizer_shards, stage_memory, workspace_bytes, zero1_ranks
from zeropp.cost.price import PlanPrice
from zeropp.cost.software import Software, software_of
from zeropp.layout import Layout
from zeropp.schedule.program import StageCost

if TYPE_CHECKING:
    from zeropp.plan import Plan


def price_plan(plan: Plan, cluster: Cluster, software: Software | None = None) -> PlanPrice:
    """Durations (seconds) and bytes of a plan. ``software``: default, the suite's own."""
    software = software or software_of(plan)
    work = Work(
        plan.shape,
        cluster.device,
        software,
        plan.precision,
        plan.recompute,
        plan.microbatch_size,
        plan.layout.tp,
        plan.layout.sequence_parallel,
    )
    stages = range(plan.schedule.num_stages)
    ranks = range(max(plan.schedule.stage_rank) + 1)
    tensor = tuple(sum(tensor_s(plan, cluster, work, s)) for s in stages)
    costs = tuple(_stage_cost(plan, cluster, work, s) for s in stages)
    return PlanPrice(
        stages=costs,
        tp_s=tensor,
        replica_s=tuple(_replica_s(plan, cluster, work, s, costs[s]) for s in stages),
        finish_s=tuple(_finish_s(plan, cluster, work, r) for r in ranks),
        gather_updated_s=tuple(_gather_updated_s(plan, cluster, work, r) for r in ranks),
        memory=tuple(stage_memory(plan, work, s) for s in stages),
        workspace=tuple(workspace_bytes(plan, work, r) for r in ranks),
        overlap_slowdown=cluster.device.overlap_slowdown,
    )


def stage_parameters(plan: Plan, stage: int) -> float:
    """Parameters of a stage on one rank, before ZeRO."""
    pieces = plan.pieces_of(stage)
    return sum(piece_parameters(plan.shape, i) for i in pieces) / plan.layout.tp


def tensor_s(plan: Plan, cluster: Cluster, work: Work, stage: int) -> tuple[float, float]:
    """Tensor-parallel collectives of a microbatch's forward and backward, recomputation's too.

    Two all-reduces of a boundary each way (arXiv 1909.08053, section 3); under sequence
    parallelism a reduce-scatter and an all-gather take the place of each (arXiv 2205.05198,
    section 4.2.2), and the backward gathers the inputs of both column-parallel products again.
    The embedding and the loss add one each.
    """
    if plan.layout.tp == 1:
        return 0.0, 0.0
    one, again = _boundary_collectives(cluster, plan.layout, work)
    pieces = plan.pieces_of(stage)
    blocks = sum(1 for i in pieces if 0 < i < plan.shape.num_pieces - 1)
    ends = len(pieces) - blocks
    forward = (2 * blocks + ends) * one
    backward = (2 * blocks + ends) * one + 2 * blocks * again
    if plan.recompute == "full":
        backward += 2 * blocks * one
    return forward, backward


@lru_cache(maxsize=4096)
def _boundary_collectives(cluster: Cluster, layout: Layout, work: Work) -> tuple[float, float]:
    size = work.tokens * work.shape.hidden * element_bytes(work.precision)
    among = group_of(cluster, layout, "tp")
    if not work.sequence_parallel:
        return all_reduce_s(cluster, among, size), 0.0
    half = gather_s(cluster, among, size)
    return 2 * half, half * cluster.device.overlap_slowdown  # hidden behind the dX product


def _stage_cost(plan: Plan, cluster: Cluster, work: Work, stage: int) -> StageCost:
    times = [piece_times(work, index) for index in plan.pieces_of(stage)]
    forward_tp, backward_tp = tensor_s(plan, cluster, work, stage)
    shard = group_of(cluster, plan.layout, "shard")
    parameters = stage_parameters(plan, stage)
    return StageCost(
        forward=sum(t.forward for t in times) + forward_tp,
        backward_input=sum(t.backward_input for t in times) + backward_tp,
        backward_weight=sum(t.backward_weight for t in times),
        unshard=gather_s(cluster, shard, parameters * element_bytes(plan.precision)),
        reduce_grad=gather_s(cluster, shard, parameters * work.software.reduce_bytes),
        transfer=_transfer_s(plan, cluster, work, stage),
    )


def _transfer_s(plan: Plan, cluster: Cluster, work: Work, stage: int) -> float:
    """A boundary to the next stage (the last stage: back to the one before)."""
    ranks = plan.schedule.stage_rank
    if len(ranks) == 1:
        return 0.0
    other = stage + 1 if stage + 1 < len(ranks) else stage - 1
    size = float(work.tokens * work.shape.hidden * element_bytes(work.precision))
    tp = plan.layout.tp
    split = tp if work.sequence_parallel or work.software.split_boundary else 1
    sent = transfer_s(cluster, plan.layout, ranks[stage], ranks[other], size / split)
    if split > 1 and not work.sequence_parallel:
        sent += gather_s(cluster, group_of(cluster, plan.layout, "tp"), size)
    return sent


def _replica_s(plan: Plan, cluster: Cluster, work: Work, stage: int, cost: StageCost) -> float:
    """Reduction of a stage's gradients over the replicas, as far as nothing hides it."""
    replicas = group_of(cluster, plan.layout, "replicate")
    if replicas.size == 1:
        return 0.0
    parameters = stage_parameters(plan, stage) / plan.layout.shard
    total = parameters * work.software.reduce_bytes
    reduce = gather_s if plan.layout.replicate_zero else all_reduce_s
    seconds = reduce(cluster, replicas, total)
    if work.software.overlap_reduction:
        hidden = cost.backward_input + cost.backward_weight
        seconds = max(seconds - hidden, seconds / max(1, len(plan.pieces_of(stage))))
    return seconds


def _gather_updated_s(plan: Plan, cluster: Cluster, work: Work, pipeline_rank: int) -> float:
    """ZeRO-1: gather the updated parameters over the replicas that split them."""
    ranks = zero1_ranks(plan.layout, work.software)
    if ranks == 1:
        return 0.0
    stride = axis_stride(plan.layout, "replicate")
    among = group(cluster, ranks, stride, plan.layout.world)
    parameters = sum(stage_parameters(plan, s) for s in plan.schedule.stages_of(pipeline_rank))
    return gather_s(cluster, among, parameters / plan.layout.shard * element_bytes(plan.precision))


def _finish_s(plan: Plan, cluster: Cluster, work: Work, pipeline_rank: int) -> float:
    """Optimizer step (Adam reads gradient, master and two moments, writes all but the first, and
    the norm reads gradients once more), the tied embedding's all-reduce, host work."""
    parameters = sum(stage_parameters(plan, s) for s in plan.schedule.stages_of(pipeline_rank))
    updated = parameters / optimizer_shards(plan.layout, work.software)
    moved = updated * (4 + 4 + 2 * 12 + element_bytes(plan.precision))
    seconds = stream_s(cluster.device, moved, kernels=4) + work.software.step_host_s
    first_or_last = pipeline_rank in (plan.schedule.stage_rank[0], plan.schedule.stage_rank[-1])
    if plan.shape.tied_embeddings and plan.layout.pp > 1 and first_or_last:
        size = plan.shape.vocab * plan.shape.hidden / plan.layout.tp / plan.layout.shard * 4
        seconds += all_reduce_s(cluster, _ends(plan, cluster), size)
    return seconds


def _ends(plan: Plan, cluster: Cluster) -> Group:
    """The first and the last pipeline rank."""
    whole = group_of(cluster, plan.layout, "pp")
    rate = whole.rate if whole.nodes == 1 else group_of(cluster, plan.layout, "pp").rate
    return Group(2, min(2, whole.nodes), rate)
