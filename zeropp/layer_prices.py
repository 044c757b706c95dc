"""Prices of a plan of a user's layers on a cluster: durations and bytes of every stage.

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

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from zeropp.cluster import NEWEST, Cluster
from zeropp.cost import PlanPrice, StageExtras, StageMemory, StepBytes, StepTimes
from zeropp.cost.communication import all_reduce_s, gather_s, group_of, transfer_s
from zeropp.cost.kernels import element_bytes, matmul_rate, stream_s
from zeropp.engine.walk import LayerSizes
from zeropp.literals import Precision, Recompute
from zeropp.plan import SizedPlan
from zeropp.programs import program_named
from zeropp.schedule.program import StageCost

_ATTENTION_BACKWARD = 2.5
_FP32 = 4  # bytes: masters, gradient sums, and the loss


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
