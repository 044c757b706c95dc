"""Layers become stages: the plan of a step for a user's layers, its price, and this rank's part.

Matrix products and attention take their counted operations at the rates that the cluster's
description says are reached; a layer's output is read once and written once. Other element-wise
kernels are left out: durations decide which of two orders is better, and are no forecast. The
input gradient of a product takes as long as its forward, and so does its weight gradient (arXiv
2401.10241); the backward of fused attention takes 2.5 times its forward, because it
computes the scores again (arXiv 2307.08691, section 4.1), and has no weight gradient.

A stage keeps of a microbatch what autograd keeps of its layers, until its weight gradients are
made; recomputed layers keep their inputs alone. Selective recomputation counts like none, which
gives an upper bound.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn

from zeropp.cluster import NEWEST, Cluster
from zeropp.cost import PlanPrice, StageExtras, StageMemory, StepBytes, StepTimes, cut_by_weight
from zeropp.cost.communication import all_reduce_s, gather_s, group_of, transfer_s
from zeropp.cost.kernels import element_bytes, matmul_rate, stream_s
from zeropp.engine.options import EngineOptions, Piece
from zeropp.engine.values import TensorShape
from zeropp.engine.walk import Layer, LayerSizes, check_values
from zeropp.layout import InfeasibleError, Layout, most_microbatches
from zeropp.literals import Precision, Recompute, if_auto
from zeropp.plan import Plan, SizedPlan
from zeropp.planner import drafts, fastest
from zeropp.programs import program_named
from zeropp.schedule import validate
from zeropp.schedule.program import StageCost, loop_placement, unordered
from zeropp.schedule.zeropp_order import cap_needs, smallest_cap, unit_size
from zeropp.settings import ParameterName, Settings
from zeropp.shape import ModelShape

_ATTENTION_BACKWARD = 2.5
_FP32 = 4  # bytes: masters, gradient sums, and the loss


@dataclass(frozen=True, kw_only=True)
class Stages:
    """A list of layers that is cut into stages by a plan, and what is said of it."""

    plan: Plan
    sizes: Sequence[LayerSizes]  # of every layer
    chosen: str = ""  # what ``auto`` has become, and the estimate behind it

    def boundary(self, stage: int) -> list[TensorShape]:
        """The tensors that one microbatch sends into a stage."""
        return [
            TensorShape(output.size, torch.bfloat16)
            if self.plan.precision == "bf16" and output.dtype.is_floating_point
            else output
            for output in self.sizes[int(self.plan.cuts[stage]) - 1].outputs
        ]

    def pieces(
        self,
        layers: Sequence[Layer],
        device: torch.device,
        tied: tuple[ParameterName, ParameterName] | None,
    ) -> list[Piece]:
        """This rank's layers, as pieces for the engine. Where ``tied`` parameters are one object in
        two stages of this rank, the second gets one of its own, because every stage has a copy."""
        pieces, cuts = [], self.plan.cuts
        rank = self.plan.layout.coordinates(dist.get_rank())["pp"]
        for stage in self.plan.schedule.stages_of(rank):
            for index in range(int(cuts[stage]), int(cuts[stage + 1])):
                layer = layers[index]
                module = layer if isinstance(layer, nn.Module) else layer()
                check_values(module, index)
                module = module.to(device)
                pieces.append(Piece(index, stage, module, deferrable=0 < index < len(layers) - 1))
        held = {piece.index: piece for piece in pieces}
        ends = [(held[index], name) for index, name in tied or () if index in held]
        if len(ends) == 2 and ends[0][0].stage != ends[1][0].stage:
            first, second = (piece.module.get_parameter(name) for piece, name in ends)
            if first is second:
                path, _, name = ends[1][1].rpartition(".")
                own = nn.Parameter(second.detach().clone(), second.requires_grad)
                setattr(ends[1][0].module.get_submodule(path), name, own)
        return pieces

    def engine_options(self, settings: Settings) -> EngineOptions:
        """The engine's options, whose names are those of the settings."""
        ends = [bisect_right(self.plan.cuts, index) - 1 for index, _ in settings.tied or ()]
        groups = tuple(dict.fromkeys(groups_of(settings, self.sizes).values()))
        return replace(settings.engine_options(), tied_stages=tuple(ends), groups=groups)

    def describe(self) -> str:
        """Degrees and knobs that were asked for or chosen, and layers per stage, in one line."""
        plan, layout, order = self.plan, self.plan.layout, self.plan.schedule
        counts = " ".join(str(int(end - begin)) for begin, end in pairwise(plan.cuts))
        return (
            f"pp={layout.pp} shard={layout.shard} replicate={layout.replicate} "
            f"chunks={layout.chunks} unit={order.unit} activation_cap={plan.activation_cap} "
            f"recompute={plan.recompute}; {order.num_microbatches} microbatches, layers per stage: "
            f"{counts}" + (f"; {self.chosen}" if self.chosen else "")
        )

    def rows(self) -> slice:
        """This rank's rows of a global batch."""
        count = self.plan.num_microbatches * self.plan.microbatch_size
        first = count * self.plan.layout.dp_index(dist.get_rank())
        return slice(first, first + count)


def groups_of(settings: Settings, sizes: Sequence[LayerSizes]) -> dict[ParameterName, str]:
    """The optimizer group of every trained parameter."""
    return {
        (index, name): settings.group_of((index, name), kind.empty())
        for index, one in enumerate(sizes)
        for name, kind in one.kinds.items()
        if kind.trained
    }


def plan_layers(settings: Settings, sizes: Sequence[LayerSizes]) -> Plan:
    """The plan of a step: stages of about equal cost, and, on a cluster, the faster of the order
    for equal durations and the one planned with theirs.

    Raises InfeasibleError where degrees, batch or layers do not go together.
    """
    world = dist.get_world_size()
    if settings.layout.world != world:
        layout = settings.layout
        raise InfeasibleError(
            f"pp={layout.pp} x shard={layout.shard} x replicate={layout.replicate} = "
            f"{layout.world}: must be the number of ranks, {world}"
        )
    sized = size_layers(settings, sizes)
    if settings.hardware is None:
        plan = next(drafts(sized)).complete()
    else:
        prices = LayerPrices(sizes, [LayerState()] * len(sizes))  # all orders have the same
        price = prices.price(sized, settings.hardware)
        orders = (draft.complete() for draft in drafts(sized, price))
        plan = fastest(orders, settings.hardware, price).plan
    validate(plan.schedule, activation_cap=plan.activation_cap)
    return plan


def size_layers(settings: Settings, sizes: Sequence[LayerSizes]) -> SizedPlan:
    """The plan of a step without its order of actions; raises as ``plan_layers`` does."""
    layout, cluster = settings.layout, settings.hardware
    if layout.pp * layout.chunks > len(sizes):
        raise InfeasibleError(
            f"chunks={layout.chunks}: {layout.pp} x {layout.chunks} stages, but there are "
            f"{len(sizes)} layers"
        )
    microbatches = _microbatches(settings, layout)
    hides = cluster is None or cluster.device.hides_collectives
    unit = unit_size(settings.unit, layout.pp, microbatches, hides_collectives=hides)
    cap = if_auto(settings.activation_cap, unit * layout.chunks)
    if cap < (least := smallest_cap(layout.chunks, microbatches, unit)):
        needs = cap_needs(layout.chunks, unit, least)
        raise InfeasibleError(f"activation_cap={cap}: {needs} (or a smaller unit)")
    placement = loop_placement(layout.pp, layout.chunks)
    plan = SizedPlan(
        contender="zeropp",
        shape=shape_of(sizes),
        layout=layout,
        microbatch_size=len(settings.sample),
        schedule=unordered("zeropp", placement, microbatches, unit),
        cuts=(),
        program="zeropp",
        precision=settings.precision,
        recompute=if_auto(settings.recompute, "none"),
        reduce_every=if_auto(settings.reduce_every, "unit"),
        reduce_dtype=settings.reduce_dtype,
        prefetch=settings.prefetch,
        split_backward=settings.split_backward and layout.pp > 1,  # else there is no bubble
        activation_cap=cap,
        compile=settings.compile,
    )
    weights = _weights(settings, sizes, plan)
    return replace(plan, cuts=cut_by_weight(weights, len(placement)))


def shape_of(sizes: Sequence[LayerSizes]) -> ModelShape:
    """What plans say of a model of a user's layers: their number alone."""
    return ModelShape(
        name="layers", family="gpt", layers=len(sizes),
        hidden=1, heads=1, kv_heads=1, ffn=1, vocab=1, seq=1,
    )  # fmt: skip


def _weights(settings: Settings, sizes: Sequence[LayerSizes], plan: SizedPlan) -> list[float]:
    """What layers cost: as the caller says, by their durations, or by their parameters."""
    if settings.weights is not None:
        return list(settings.weights)
    if (cluster := settings.hardware) is not None:
        costs = layer_costs(sizes, cluster, plan.precision, plan.recompute)
        return [cost.compute for cost in costs]
    return [max(1, one.parameters) for one in sizes]


def _microbatches(settings: Settings, layout: Layout) -> int:
    rows, batch = len(settings.sample), settings.global_batch
    slots = layout.dp * rows
    if batch % slots:
        raise InfeasibleError(
            f"global_batch={batch}: must be a multiple of {slots}, the sample's {rows} rows x "
            f"{layout.dp} data-parallel ranks"
        )
    most = most_microbatches(layout.pp * layout.chunks)
    if batch // slots > most:
        raise InfeasibleError(
            f"global_batch={batch}: must be at most {most * slots}, for {most} microbatches that "
            "can be planned (or take a larger microbatch)"
        )
    return batch // slots


@dataclass(frozen=True)
class LayerState:
    """Bytes of one layer's gradients in fp32 (frozen parameters have none), and of what the
    optimizer keeps for them."""

    sums: float = 0.0
    optimizer: float = 0.0


def layer_costs(
    sizes: Sequence[LayerSizes], cluster: Cluster, precision: Precision, recompute: Recompute
) -> list[StageCost]:
    """Forward, input gradient and weight gradient of every layer for one microbatch, in seconds.

    The first and the last layer delay no weight gradients, and are not recomputed.
    """
    found, device = [], cluster.device.of_year(NEWEST)
    rate = matmul_rate(device, precision)
    for index, one in enumerate(sizes):
        products = one.product_flops / rate
        attention = one.attention_flops / (rate * device.attention_efficiency)
        streamed = stream_s(device, 2 * output_bytes(one, precision))
        forward = products + attention + streamed
        backward = products + _ATTENTION_BACKWARD * attention + streamed
        weight = products
        if not 0 < index < len(sizes) - 1:
            backward, weight = backward + products, 0.0
        elif recompute == "full":
            backward += forward
        found.append(StageCost(forward=forward, backward_input=backward, backward_weight=weight))
    return found


def output_bytes(one: LayerSizes, precision: Precision) -> float:
    """Bytes of a layer's outputs for one microbatch."""
    return float(sum(output.size.numel() * element_bytes(precision) for output in one.outputs))


@dataclass(frozen=True)
class LayerPrices:
    """Prices plans whose pieces are these layers, each with its state."""

    sizes: Sequence[LayerSizes]
    states: Sequence[LayerState]

    def price(self, plan: SizedPlan, cluster: Cluster) -> PlanPrice:
        """Durations and bytes of a plan."""
        return PlanPrice(**vars(self.times(plan, cluster)), **vars(self.memory(plan, cluster)))

    def passes(self, plan: SizedPlan, cluster: Cluster) -> tuple[tuple[float, float, float], ...]:
        """Seconds of every stage's forward, input gradient and weight gradient."""
        layers = layer_costs(self.sizes, cluster, plan.precision, plan.recompute)
        return tuple(
            (
                sum(one.forward for one in layers[begin:end]),
                sum(one.backward_input for one in layers[begin:end]),
                sum(one.backward_weight for one in layers[begin:end]),
            )
            for begin, end in _spans(plan)
        )

    def times(self, plan: SizedPlan, cluster: Cluster) -> StepTimes:
        """Durations in seconds: of every stage's layers, gather, reduction and messages, and of the
        reduction over the replicas."""
        layout, ranks = plan.layout, plan.schedule.stage_rank
        among, replicas = (group_of(cluster, layout, axis) for axis in ("shard", "replicate"))
        width, sent = element_bytes(plan.precision), element_bytes(plan.reduce_dtype)
        stages, replica_s = [], []
        passes = self.passes(plan, cluster)
        for stage, (begin, end) in enumerate(_spans(plan)):
            forward, input_, weight = passes[stage]
            parameters = sum(one.parameters for one in self.sizes[begin:end])
            cost = StageCost(
                forward=forward,
                backward_input=input_,
                backward_weight=weight,
                unshard=gather_s(cluster, among, parameters * width),
                reduce_grad=gather_s(cluster, among, parameters * sent),
            )
            if stage + 1 < len(ranks):
                moved = output_bytes(self.sizes[end - 1], plan.precision)
                here, there = ranks[stage], ranks[stage + 1]
                transfer = transfer_s(cluster, layout, source=here, target=there, size=moved)
                cost = replace(cost, transfer=transfer)
            stages.append(cost)
            size = parameters * _FP32 / layout.shard
            replica_s.append(all_reduce_s(cluster, replicas, size))
        none = (0.0,) * layout.pp
        return StepTimes(
            stages=tuple(stages),
            extras=(StageExtras(),) * len(stages),
            replica_s=tuple(replica_s),
            finish_s=none,
            gather_updated_s=none,
            limit_s=0.0,
            overlap_slowdown=cluster.device.overlap_slowdown,
        )

    def memory(self, plan: SizedPlan, cluster: Cluster) -> StepBytes:
        """Bytes of every stage."""
        del cluster
        return StepBytes(
            memory=tuple(self._of_stage(plan, begin, end) for begin, end in _spans(plan)),
            resident_gradients=program_named(plan.program).resident_gradients,
            flat_chunks=True,
        )

    def _of_stage(self, plan: SizedPlan, begin: int, end: int) -> StageMemory:
        layout, sizes, width = plan.layout, self.sizes, element_bytes(plan.precision)
        parameters = sum(one.parameters for one in sizes[begin:end])
        sums = sum(state.sums for state in self.states[begin:end])
        ends = sum(self.states[i].sums for i in {0, len(sizes) - 1} & set(range(begin, end)))
        rows = layout.replicate if layout.replicate_zero else 1  # that divide the optimizer's work
        masters = float(parameters * _FP32)
        if plan.precision == "bf16" and rows > 1:
            masters = masters / rows + parameters * width
        kept, again = self._kept(plan, begin, end)
        out = output_bytes(sizes[end - 1], plan.precision)
        loss = 2 * _FP32 / width * out if end == len(sizes) else 0.0
        boundary = output_bytes(sizes[begin - 1], plan.precision) if begin else 0.0
        reduced = sums if layout.shard > 1 else 0.0
        found = {
            "parameters": masters / layout.shard,
            "optimizer": sum(s.optimizer for s in self.states[begin:end]) / layout.shard / rows,
            "gradients": sums / layout.shard,
            "unsharded": parameters * width if plan.gathers else 0.0,
            "unsharded_gradients": reduced,
            "early_gradients": ends if layout.shard > 1 else 0.0,
            "activations": kept,
            "deferred": kept,
            "boundary": boundary,
            "forward": kept + out + loss,
            "backward_input": kept + again + out + loss,
            "full_backward": kept + again + out + loss,
        }
        of_none = dict.fromkeys(StageMemory.__dataclass_fields__, 0)
        return StageMemory(**of_none | {name: int(size) for name, size in found.items()})

    def _kept(self, plan: SizedPlan, begin: int, end: int) -> tuple[float, float]:
        """What a stage keeps of one microbatch, and what it recomputes at a time."""
        share = element_bytes(plan.precision) / _FP32
        saved = [share * one.saved_bytes for one in self.sizes]
        if plan.recompute != "full":
            return sum(saved[begin:end]), 0.0
        inner = range(max(begin, 1), min(end, len(saved) - 1))
        kept = sum(saved[i] for i in range(begin, end) if i not in inner)
        kept += sum(output_bytes(self.sizes[i - 1], plan.precision) for i in inner)
        return kept, max((saved[i] for i in inner), default=0.0)


def _spans(plan: SizedPlan) -> list[tuple[int, int]]:
    return [(int(begin), int(end)) for begin, end in pairwise(plan.cuts)]
