"""Durations of a user's layers on a described cluster, for the order of a step and for the cut.

Matrix products and attention take their counted operations at the rates that the cluster's
description says are reached; a layer's output is read once and written once. Other element-wise
kernels are left out: durations decide which of two orders is better, and are no forecast. The
input gradient of a product takes as long as its forward, and so does its weight gradient (arXiv
2401.10241); the backward of fused attention takes 2.5 times its forward, because it
computes the scores again (arXiv 2307.08691, section 4.1), and has no weight gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from zeropp.cluster import Cluster
from zeropp.cost.communication import gather_s, group_of, transfer_s
from zeropp.cost.kernels import element_bytes, matmul_rate, stream_s
from zeropp.engine.walk import LayerSizes
from zeropp.layout import Layout
from zeropp.literals import Precision, Recompute, WireType
from zeropp.schedule.program import StageCost

_ATTENTION_BACKWARD = 2.5


@dataclass(frozen=True)
class Conditions:
    """What durations depend on, besides the layers."""

    cluster: Cluster
    precision: Precision
    recompute: Recompute
    reduce_dtype: WireType


def layer_costs(sizes: Sequence[LayerSizes], given: Conditions) -> list[StageCost]:
    """Forward, input gradient and weight gradient of every layer for one microbatch, in seconds.

    The first and the last layer delay no weight gradients, and are not recomputed.
    """
    last = len(sizes) - 1
    return [_layer_cost(one, given, inner=0 < i < last) for i, one in enumerate(sizes)]


def _layer_cost(one: LayerSizes, given: Conditions, *, inner: bool) -> StageCost:
    device = given.cluster.device
    rate = matmul_rate(device, given.precision)
    products = one.product_flops / rate
    attention = one.attention_flops / (rate * device.attention_efficiency)
    streamed = stream_s(device, 2 * output_bytes(one, given.precision))
    forward = products + attention + streamed
    backward = products + _ATTENTION_BACKWARD * attention + streamed
    if not inner:
        return StageCost(forward=forward, backward_input=backward + products, backward_weight=0.0)
    again = forward if given.recompute == "full" else 0.0
    return StageCost(forward=forward, backward_input=backward + again, backward_weight=products)


def output_bytes(one: LayerSizes, precision: Precision) -> float:
    """Bytes of a layer's outputs for one microbatch."""
    width = element_bytes(precision)
    return float(sum(output.size.numel() * width for output in one.outputs))


def stage_costs(
    sizes: Sequence[LayerSizes],
    cuts: Sequence[int],
    *,
    stage_rank: Sequence[int],
    layout: Layout,
    given: Conditions,
) -> tuple[StageCost, ...]:
    """Durations of every stage in seconds: of its layers, of its gather, of its reduction, and of
    the message to the next stage."""
    layers = layer_costs(sizes, given)
    among = group_of(given.cluster, layout, "shard")
    sent = 2 if given.reduce_dtype == "bf16" else 4
    found = []
    for stage, (begin, end) in enumerate(pairwise(cuts)):
        mine = layers[begin:end]
        parameters = sum(one.parameters for one in sizes[begin:end])
        cost = StageCost(
            forward=sum(one.forward for one in mine),
            backward_input=sum(one.backward_input for one in mine),
            backward_weight=sum(one.backward_weight for one in mine),
            unshard=gather_s(given.cluster, among, parameters * element_bytes(given.precision)),
            reduce_grad=gather_s(given.cluster, among, parameters * sent),
        )
        if stage + 1 < len(stage_rank):
            moved = output_bytes(sizes[end - 1], given.precision)
            here, there = stage_rank[stage], stage_rank[stage + 1]
            transfer = transfer_s(given.cluster, layout, source=here, target=there, size=moved)
            cost = replace(cost, transfer=transfer)
        found.append(cost)
    return tuple(found)
