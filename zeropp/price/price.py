"""The price of a plan on a cluster.

``price_plan`` reads the plan's sizes and its schedule's name, counts and placement, but never its
programs, so that the tuner can price a plan before it builds them. Equal blocks are priced once.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from math import inf
from statistics import NormalDist

from zeropp.price import zero3
from zeropp.price.cluster import Cluster, host_of
from zeropp.price.communication import (
    TensorTimes,
    by_heads,
    gather_updated_s,
    replica_s,
    shard_s,
    shard_waits_s,
    stage_parameters,
    tensor_times,
    tied_s,
    update_s,
)
from zeropp.price.compute_limit import compute_limit
from zeropp.price.kernels import element_bytes
from zeropp.price.memory import offloaded_bytes, shares_ends, stage_memory
from zeropp.price.network import crosses_nodes, gather_s, group_of, transfer_s
from zeropp.price.pieces import (
    PASS_LAUNCHES,
    PassTimes,
    PieceTimes,
    Work,
    accumulation_bytes,
    gradients_of,
    piece_times,
)
from zeropp.price.plan_price import PlanPrice, StageExtras, StepBytes, StepTimes
from zeropp.price.programs import Program, program_of
from zeropp.schedule.cuts import spread_blocks
from zeropp.schedule.plan import SizedPlan
from zeropp.schedule.program import ScheduleSizes, StageCost
from zeropp.types.frozen import replace
from zeropp.types.layout import Layout


def equally_priced(plan: SizedPlan, cluster: Cluster) -> tuple[int, ...]:
    """For each stage, the first stage with the same price, that is with the same pieces and with
    neighbours at the same distance. Most stages are equal, so that few have to be priced."""
    return _first(
        plan.cuts,
        plan.shape.num_pieces,
        tuple(zip(plan.recomputed_per_stage, plan.offloaded_per_stage, strict=True)),
        _hops(cluster, plan.layout, plan.schedule.stage_rank),
    )


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
    cuts: tuple[int, ...],
    pieces: int,
    treated: tuple[tuple[int, int], ...],  # blocks that are recomputed, and offloaded
    hops: tuple[int, ...],
) -> tuple[int, ...]:
    first: dict[tuple[object, ...], int] = {}
    like = []
    for stage, (begin, end) in enumerate(pairwise(cuts)):
        ends, ways = (begin == 0, end == pieces), hops[stage : stage + 2]
        key = (end - begin, treated[stage], ends, ways)
        like.append(first.setdefault(key, stage))
    return tuple(like)


_MOST_OF_LINK = 0.9  # two users of a link share it, however much one of them could take

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
    tensor = tensor_times(plan, cluster, work)
    like = equally_priced(plan, cluster)
    first = {s: _timed_stage(plan, cluster, work, tensor, s) for s in set(like)}
    network_share = 0.0
    if plan.offloaded_stages:
        network_share, rate = host_network_share(plan.layout, cluster), host_of(cluster).rate
        sent = offloaded_bytes(plan, work)
        for s, (cost, extras) in first.items():
            first[s] = replace(cost, store=sent[s] / rate, load=sent[s] / rate), extras
    costs = [first[s][0] for s in like]
    parameters = {s: stage_parameters(plan, s) for s in first}
    world = plan.layout.world
    slowest = stragglers(cluster, world)
    for rank in range(plan.schedule.num_ranks):
        held = plan.schedule.stages_of(rank)
        size = sum(parameters[like[s]] for s in held)
        costs[held[0]] = replace(
            costs[held[0]],
            update=update_s(plan, cluster, work, parameters=size),
            gather_updated=gather_updated_s(
                plan,
                cluster,
                work,
                stages=held,
                parameters=size,
                forwards=[costs[s].forward * slowest for s in held],
            ),
        )
        for stage in [s for s in held if s in plan.tied_stages][:1]:  # both ends, if it has both
            costs[stage] = replace(costs[stage], reduce_tied=tied_s(plan, cluster))
    limit = compute_limit(plan.shape, cluster, world, plan.precision)
    return StepTimes(
        stages=tuple(costs),
        extras=tuple(first[s][1] for s in like),
        steps_overlap=work.program.post_validation,
        stragglers=slowest,
        overlap_slowdown=cluster.device.overlap_slowdown,
        network_share=network_share,
        limit_s=plan.global_batch * plan.shape.seq / (world * limit.tokens_per_s_per_gpu),
    )


def plan_bytes(plan: SizedPlan, cluster: Cluster, program: Program | None = None) -> StepBytes:
    """The bytes of a plan's stages; ``program`` as in ``price_plan``."""
    order = plan.schedule
    sizes = ScheduleSizes(
        name=order.name,
        num_microbatches=order.num_microbatches,
        unit=1,
        stage_rank=order.stage_rank,
    )
    alike = replace(plan, schedule=sizes, activation_cap=0, offloaded=())
    held = _bytes_of_alike(alike, cluster, program)
    if not plan.offloaded_stages:
        return held
    sent = offloaded_bytes(plan, work_of(plan, cluster, program))
    each = {(id(of), n): (of, n) for of, n in zip(held.memory, sent, strict=True)}
    new = {key: replace(of, sent=n) for key, (of, n) in each.items()}
    memory = tuple(new[id(of), n] for of, n in zip(held.memory, sent, strict=True))
    return replace(held, memory=memory, host_limit=host_limit(plan, cluster))


@lru_cache(maxsize=4096)
def _bytes_of_alike(plan: SizedPlan, cluster: Cluster, program: Program | None) -> StepBytes:
    """The bytes of all plans that differ in order, unit, cap and offloaded blocks alone."""
    work = work_of(plan, cluster, program)
    program = work.program
    like = equally_priced(plan, cluster)
    first = {s: stage_memory(plan, work, s) for s in set(like)}
    return StepBytes(
        memory=tuple(first[s] for s in like),
        shared_ends=shares_ends(plan, program),
        gathers_ahead=program.flat_chunks or (plan.layout.shards > 1 and not program.fsdp_root),
        torch_runtime=program.torch_stages,
        keeps_sent=program.keeps_sent,
        resident_gradients=program.resident_gradients,
        flat_chunks=program.flat_chunks,
    )


def host_limit(plan: SizedPlan, cluster: Cluster) -> float:
    """The bytes of its node's memory that a rank of the plan may take."""
    if not plan.offloaded_stages:
        return inf
    host = host_of(cluster)
    return host.memory_gib * 2**30 * host.memory_share / cluster.gpus_per_node


def host_network_share(layout: Layout, cluster: Cluster) -> float:
    """The share of a GPU's link to its host that gathers and reductions take while they run, if the
    NIC sends and receives over it. What is left is the host's."""
    host = host_of(cluster)
    if not host.shares_network or group_of(cluster, layout, *layout.shard_axes).nodes == 1:
        return 0.0
    of_gpu = cluster.nic_rate * cluster.nics_per_node / cluster.gpus_per_node
    return min(of_gpu / host.rate, _MOST_OF_LINK)


def work_of(plan: SizedPlan, cluster: Cluster, program: Program | None = None) -> Work:
    """Everything on which the price of a plan's pieces depends; ``program`` as in
    ``price_plan``."""
    program = program or program_of(plan)
    return Work(
        shape=plan.shape,
        device=cluster.device.of_year(program.kernels),
        program=program,
        precision=plan.precision,
        recompute=plan.recompute,
        microbatch=plan.microbatch_size,
        tp=plan.layout.tp,
        sequence_parallel=plan.layout.sequence_parallel,
        context=plan.layout.context,
        by_heads=by_heads(plan, cluster),
        merged=1 if plan.precision == "fp8" else plan.merged_microbatches,
        slices=plan.logits_slices,
        accumulated=_accumulated(plan, program),
    )


def _accumulated(plan: SizedPlan, program: Program) -> float:
    """Bytes per parameter that move, on average, when a microbatch's gradients join those of
    earlier ones. FSDP2 adds nothing for the first microbatch after a reduction: it casts that
    microbatch's gradients if others follow, and reduces them as they are if none do (torch 2.13,
    ``_fsdp_param.py``, ``to_accumulated_grad_if_needed``)."""
    if program.live_parameters:  # beside compute, on another stream
        return 0.0
    each = accumulation_bytes(program, plan.precision)
    if not program.fsdp_hooks:
        return each
    together = plan.num_microbatches  # whose gradients are reduced together
    if plan.reduce_every == "unit":
        together = min(together, plan.schedule.unit)
    if together == 1:
        return 0.0
    sums, element = program.state(plan.precision).gradients, element_bytes(plan.precision)
    if plan.sum_dtype == "bf16":  # autograd adds them
        sums, each = element, 3 * element
    cast = sums + element if sums > element else 0
    return (cast + each * (together - 1)) / together


@lru_cache(maxsize=4096)
def _piece_times(work: Work, tensor: TensorTimes) -> tuple[PieceTimes, PieceTimes, PieceTimes]:
    """(times of the plan's pieces, those without recomputation, those with fused accumulation)."""
    ideal = accumulation_bytes(replace(work.program, fused_accumulation=True), work.precision)
    fused = replace(work, accumulated=min(work.accumulated, ideal))
    variants = (work, replace(work, recompute="none"), fused)
    times = [
        piece_times(variant, tensor.forward, tensor.backward, tensor.again) for variant in variants
    ]
    return times[0], times[1], times[2]


def _timed_stage(
    plan: SizedPlan, cluster: Cluster, work: Work, tensor: TensorTimes, stage: int
) -> tuple[StageCost, StageExtras]:
    forward, input_, weight = passes_s(plan, work, tensor)[stage]
    transfer = _transfer_s(plan, cluster, work, stage)
    extras = _extras(plan, cluster, work, tensor, stage)
    if work.program.blocking_transfers or work.device.is_cpu:  # whose cores copy
        before = _transfer_s(plan, cluster, work, stage - 1)
        extras = replace(extras, transfer_forward=transfer, transfer_backward=before)
        forward, transfer = forward + transfer, 0.0
        input_ += before
    cost = StageCost(
        forward=forward,
        backward_input=input_,
        backward_weight=weight,
        transfer=transfer,
        waits_for_reduction=work.program.torch_stages,
        parts=plan.parts_of(stage),
        again=extras.recomputation / plan.blocks[stage]
        if plan.recomputed_per_stage[stage] == plan.blocks[stage] > 0
        else 0.0,
        **shard_s(plan, cluster, work, stage),
    )
    if work.program.live_parameters and plan.layout.shards > 1:
        exposed = zero3.exposed_s(
            plan,
            cluster,
            work,
            gradients=sum(gradients_of(plan, work, 0), ()),
            forward_s=cost.forward,
            backward_s=cost.backward_input + cost.backward_weight,
        )
        cost = replace(
            cost,
            forward=cost.forward + exposed.forward,
            backward_weight=cost.backward_weight + exposed.backward,
        )
        return cost, replace(
            extras,
            gathers=exposed.forward,
            reductions=exposed.backward,
            hidden_replicas=exposed.hidden * plan.num_microbatches,
        )
    over_replicas, hidden = replica_s(plan, cluster, work, stage=stage, cost=cost)
    earlier = 0.0
    if plan.layout.replicate_zero == 2:  # reduces for every microbatch
        earlier = over_replicas * (1 - 1 / plan.num_microbatches)
        hidden *= plan.num_microbatches
    cost = replace(cost, backward_weight=weight + earlier, reduce_replicas=over_replicas)
    return cost, replace(extras, reductions=earlier, hidden_replicas=hidden)


@lru_cache(maxsize=1024)
def stragglers(cluster: Cluster, world: int) -> float:
    """The factor on the compute of a job of ``world`` GPUs: the expected time of its slowest node,
    divided by that of a single node, on which the constants were measured. Compute times are taken
    for normally distributed; the expected largest of n is Blom's approximation (1958)."""
    nodes = -(-world // cluster.gpus_per_node)
    return 1.0 + NODE_SPREAD * NormalDist().inv_cdf((nodes - 0.375) / (nodes + 0.25))


def _extras(
    plan: SizedPlan, cluster: Cluster, work: Work, tensor: TensorTimes, stage: int
) -> StageExtras:
    """What a stage's durations include in addition to the model's kernels, messages aside. The
    embedding and the head each add one tensor-parallel collective to the forward and one to the
    backward."""
    times, plain, fused = _piece_times(work, tensor)
    blocks = plan.blocks[stage]
    ends_s = len(_ends_of(plan, stage, times)) * tensor.collective
    logits = tensor.logits * (plan.cuts[stage + 1] == plan.shape.num_pieces)
    repeated = plan.recomputed_per_stage[stage]
    again = times.block.backward_input - plain.block.backward_input - tensor.again
    return StageExtras(
        tensor_forward=blocks * tensor.forward + ends_s + logits,
        tensor_backward=blocks * tensor.backward + repeated * tensor.again + ends_s,
        recomputation=repeated * again,
        accumulation=_backward_s(plan, stage, times) - _backward_s(plan, stage, fused),
        waits=shard_waits_s(plan, cluster, work, stage),
    )


def _backward_s(plan: SizedPlan, stage: int, times: PieceTimes) -> float:
    """Seconds of the input and weight gradients of a stage; all of its blocks are recomputed, or
    none."""
    held = [(plan.blocks[stage], times.block), *((1, end) for end in _ends_of(plan, stage, times))]
    return sum(count * (part.backward_input + part.backward_weight) for count, part in held)


def _ends_of(plan: SizedPlan, stage: int, times: PieceTimes) -> list[PassTimes]:
    """The times of embedding and head, if the stage has them."""
    is_last = plan.cuts[stage + 1] == plan.shape.num_pieces
    return [times.embedding] * (plan.cuts[stage] == 0) + [times.head] * is_last


def pass_times(plan: SizedPlan, cluster: Cluster) -> tuple[tuple[float, float, float], ...]:
    """As ``passes_s``, for a plan on a cluster, on the slowest of its nodes."""
    work = work_of(plan, cluster)
    slowest = stragglers(cluster, plan.layout.world)
    return passes_s(plan, work, tensor_times(plan, cluster, work), slowest)


def passes_s(
    plan: SizedPlan, work: Work, tensor: TensorTimes, slowest: float = 1.0
) -> tuple[tuple[float, float, float], ...]:
    """Seconds of every stage's forward, input gradient and weight gradient, in which transfers, if
    they block compute, are left out. Compute takes ``slowest`` times as long, collectives do
    not."""
    return _passes_s(
        work,
        tensor,
        slowest,
        cuts=plan.cuts,
        blocks=plan.blocks,
        recomputed=plan.recomputed_per_stage,
    )


@lru_cache(maxsize=16384)
def _passes_s(
    work: Work,
    tensor: TensorTimes,
    slowest: float,
    *,
    cuts: tuple[int, ...],
    blocks: tuple[int, ...],
    recomputed: tuple[int, ...],
) -> tuple[tuple[float, float, float], ...]:
    times, plain, _ = _piece_times(work, tensor)
    start = PASS_LAUNCHES * work.launch_s if work.device.is_cpu else 0.0
    passes = []
    for (begin, end), count, repeated in zip(pairwise(cuts), blocks, recomputed, strict=True):
        ends = [plain.embedding] * (begin == 0) + [plain.head] * (end == cuts[-1])
        outside = len(ends) * tensor.collective + tensor.logits * (end == cuts[-1])
        waits = count * tensor.forward + outside
        waits_back = count * tensor.backward + repeated * tensor.again
        waits_back += len(ends) * tensor.collective
        forward = count * times.block.forward + outside
        input_ = (count - repeated) * plain.block.backward_input + len(ends) * tensor.collective
        input_ += repeated * times.block.backward_input
        weight = count * times.block.backward_weight
        for piece in ends:
            forward += piece.forward
            input_ += piece.backward_input
            if work.program.delays_ends:
                weight += piece.backward_weight
            else:
                input_ += piece.backward_weight
        forward += (slowest - 1) * (forward - waits)
        input_ += (slowest - 1) * (input_ - waits_back)
        passes.append((start + forward, start + input_, start + slowest * weight))
    return tuple(passes)


def _transfer_s(plan: SizedPlan, cluster: Cluster, work: Work, stage: int) -> float:
    """Seconds of a transfer from a stage to the next; the last stage has none. If the shard group's
    collectives use the same network, the transfer gets half of the bandwidth."""
    ranks, other = plan.schedule.stage_rank, stage + 1
    if stage < 0 or other == len(ranks):
        return 0.0
    size = float(work.tokens * work.shape.hidden * element_bytes(work.precision))
    if plan.layout.shards > 1:
        shards_cross = group_of(cluster, plan.layout, *plan.layout.shard_axes).nodes > 1
        if shards_cross == crosses_nodes(cluster, plan.layout, ranks[stage], ranks[other]):
            size *= 2
    split = plan.layout.tp if work.sequence_parallel or work.program.split_boundary else 1
    sent = transfer_s(
        cluster, plan.layout, source=ranks[stage], target=ranks[other], size=size / split
    )
    if split > 1 and not work.sequence_parallel:
        sent += gather_s(cluster, group_of(cluster, plan.layout, "tp"), size)
    return sent


def cut_by_cost(
    plan: SizedPlan, cluster: Cluster, program: Program | None = None
) -> tuple[int, ...]:
    """The cuts of a plan's model by the times of its pieces (embedding, blocks, head) on the
    cluster: forward, input gradient and weight gradient of one microbatch.

    With several chunks per rank the sum over a rank's stages counts, so that a short stage makes
    up for a long one. All blocks take the same time, so a cut is a number of blocks per stage. The
    plan's own ``cuts`` are not read; ``program`` is as in ``price_plan``. ``spread_blocks`` says
    what is minimised.
    """
    work = work_of(plan, cluster, program)
    return _cuts(work, tensor_times(plan, cluster, work), plan.schedule.stage_rank)


@lru_cache(maxsize=65536)
def _cuts(work: Work, tensor: TensorTimes, stage_rank: tuple[int, ...]) -> tuple[int, ...]:
    times = piece_times(work, tensor.forward, tensor.backward, tensor.again)
    embedding, head = (
        # Rounded, so that plans that differ little share their cuts.
        round((end.total + 2 * tensor.collective) / times.block.total, 3)
        for end in (times.embedding, times.head)
    )
    return spread_blocks(work.shape.layers, stage_rank, embedding, head)
