"""Prices of plans for a user's layers.

Durations are those of the operators that the walk over the layers has recorded, and of a loss like
torch's cross-entropy over the last layer's outputs. Every operator has the price that it has in the
suite's models (``zeropp.price.kernels``), whose operators are known by the model's shape. On these
models the prices of stages agree to 2 %, except a stage of the embedding alone
(``tests/gloo/test_engine_memory.py``). Communication has the formulas of the suite's plans.

A stage keeps of a microbatch what autograd keeps of its layers, until its weight gradients are
made; recomputed layers keep their inputs alone. Selective recomputation counts like none, which
gives an upper bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING

from zeropp.price import StageExtras, StageMemory, StepBytes, StepTimes
from zeropp.price.cluster import Cluster, Device, host_of
from zeropp.price.kernels import (
    element_bytes,
    fused_attention_backward_s,
    fused_attention_s,
    matmul_s,
    stream_s,
)
from zeropp.price.network import (
    all_reduce_s,
    all_to_all_s,
    gather_s,
    group_of,
    transfer_s,
    waits_s,
)
from zeropp.price.pieces import (
    BACKWARD_LAUNCHES,
    CAST_BYTES,
    KernelSeconds,
    PassTimes,
    accumulation_bytes,
    eight_bit_gain,
    loss_s,
    passes_of,
)
from zeropp.price.price import host_limit, host_network_share
from zeropp.price.programs import Program, gathers, program_as_run, program_named
from zeropp.schedule.plan import SizedPlan
from zeropp.schedule.program import StageCost
from zeropp.types.operators import Gradient, LayerOperators

if TYPE_CHECKING:
    from zeropp.engine.walk import LayerSizes
    from zeropp.types.literals import Precision, Recompute

_FP32 = 4  # bytes: masters, gradient sums, and the loss


@dataclass(frozen=True)
class LayerState:
    """Bytes of one layer's gradients in fp32 (frozen parameters have none), of what the optimizer
    keeps for them, and of those among them that are updated whole."""

    sums: float = 0.0
    optimizer: float = 0.0
    whole: float = 0.0


@lru_cache(maxsize=4096)
def passes_of_layer(
    layer: LayerOperators,
    device: Device,
    program: Program,
    precision: Precision,
    recompute: Recompute,
) -> PassTimes:
    """Seconds of one layer's passes for one microbatch; with "fp8" all of its products are in 8
    bits, as those of linear layers are, which are all but a little of them."""
    element = element_bytes(precision) * program.traffic_factor
    gain = program.attention_gain(device)
    forwards = [kernel.forward for kernel in layer.elementwise if kernel.forward]
    backwards = _backwards(layer, "input")
    times = eight_bit_gain(device, program, precision)
    weights = _gradients_s(layer, "weight", device, precision, times)
    cast = CAST_BYTES[program.scaling] * (precision == "fp8")
    inputs = sum(of.batch * (of.m * of.k + of.k * of.n) for of in layer.products)
    outputs = sum(of.batch * of.m * of.n for of in layer.products)
    moved = sum(element * elements for elements in _backwards(layer, "weight"))
    moved += accumulation_bytes(program, precision) * layer.trained
    adding = len(weights) + len(_backwards(layer, "weight"))
    products = [
        matmul_s(device, precision, m=of.m, k=of.k, n=of.n, batch=of.batch, gain=times)
        for of in layer.products
    ]
    h = min((max(product.k, product.n) for product in layer.products), default=0)
    kernels = KernelSeconds(
        products=sum(products),
        transposed=sum(_gradients_s(layer, "input", device, precision, times)),
        weights=sum(weights),
        attention=sum(
            fused_attention_s(device, precision, attention, gain=gain)
            for attention in layer.attentions
        ),
        attention_backward=sum(
            fused_attention_backward_s(device, precision, attention, gain=gain)
            for attention in layer.attentions
            if attention.has_backward
        ),
        elementwise=stream_s(device, element * sum(forwards) + cast * inputs, len(forwards)),
        elementwise_backward=stream_s(
            device, element * sum(backwards) + cast * outputs, len(backwards)
        ),
        accumulation=stream_s(device, moved, adding),
        last=products[-1] if layer.ends_in_product else 0.0,
        wide=sum(s for s, of in zip(products, layer.products, strict=True) if max(of.k, of.n) > h),
    )
    host_s = layer.launches * device.launch_us * program.launch_factor * 1e-6
    return passes_of(
        kernels,
        program,
        recompute,
        host_s=host_s,
        back_host_s=BACKWARD_LAUNCHES * host_s,
        in_line=program.blocking_launches or device.is_cpu,
    )


def _backwards(layer: LayerOperators, gradient: Gradient) -> list[int]:
    """The elements that each kernel moves which computes such gradients."""
    return [
        kernel.backward
        for kernel in layer.elementwise
        if kernel.gradient == gradient and kernel.backward
    ]


def _gradients_s(
    layer: LayerOperators, gradient: Gradient, device: Device, precision: Precision, gain: float
) -> list[float]:
    """The seconds of each product that computes such a gradient of a product's factor, at ``gain``
    times the rate of the precision."""
    seconds = []
    for product in layer.products:
        m, k, n, batch = product.m, product.k, product.n, product.batch
        if product.left == gradient:
            seconds.append(matmul_s(device, precision, m=m, k=n, n=k, batch=batch, gain=gain))
        if product.right == gradient:
            seconds.append(matmul_s(device, precision, m=k, k=m, n=n, batch=batch, gain=gain))
    return seconds


def layer_passes(sizes: Sequence[LayerSizes], plan: SizedPlan, cluster: Cluster) -> list[PassTimes]:
    """Seconds of every layer's passes for one microbatch; those of the last one include the loss.

    The first and the last layer are not recomputed.
    """
    program = program_as_run(plan.program, compiled=plan.compile)
    device = cluster.device.of_year(program.kernels)
    passes = []
    for index, layer in enumerate(sizes):
        assert layer.operators is not None  # the walk records them where something is priced
        recompute, precision = plan.recompute, plan.precision
        if index in (0, len(sizes) - 1):  # neither recomputed nor in 8 bits
            recompute, precision = "none", "fp32" if precision == "fp32" else "bf16"
        times = passes_of_layer(layer.operators, device, program, precision, recompute)
        exchanged = 0.0  # keys and values count as if they had as many heads as queries
        for attention in layer.operators.attentions if plan.layout.context > 1 else ():
            size = attention.heads * attention.queries * attention.width
            for tensors in (3, 1):  # queries, keys and values; what attention gives
                moved = float(tensors * size * element_bytes(plan.precision))
                exchanged += all_to_all_s(cluster, group_of(cluster, plan.layout, "context"), moved)
        again = exchanged * (recompute != "none")
        passes.append(
            replace(
                times,
                forward=times.forward + exchanged,
                backward_input=times.backward_input + exchanged + again,
            )
        )
    forward, backward = loss_s(
        device, program, plan.precision, sum(output.size.numel() for output in sizes[-1].outputs)
    )
    last = passes[-1]
    forward, backward = last.forward + forward, last.backward_input + backward
    if plan.logits_slices > 1:  # all of it is in the backward
        forward, backward = 0.0, forward + backward
    passes[-1] = PassTimes(forward, backward, last.backward_weight)
    for end in {0, len(passes) - 1}:  # of these weight gradients are never delayed
        times = passes[end]
        backward = times.backward_input + times.backward_weight
        passes[end] = replace(times, backward_input=backward, backward_weight=0.0)
    return passes


def output_bytes(layer: LayerSizes, precision: Precision) -> float:
    """Bytes of a layer's outputs for one microbatch."""
    return float(sum(output.size.numel() * element_bytes(precision) for output in layer.outputs))


@dataclass(frozen=True)
class LayerPrices:
    """Prices plans whose pieces are these layers, each with its state."""

    sizes: Sequence[LayerSizes]
    states: Sequence[LayerState]

    def passes(self, plan: SizedPlan, cluster: Cluster) -> tuple[tuple[float, float, float], ...]:
        """Seconds of every stage's forward, input gradient and weight gradient."""
        layers = layer_passes(self.sizes, plan, cluster)
        return tuple(
            (
                sum(layer.forward for layer in layers[begin:end]),
                sum(layer.backward_input for layer in layers[begin:end]),
                sum(layer.backward_weight for layer in layers[begin:end]),
            )
            for begin, end in pairwise(plan.cuts)
        )

    def times(self, plan: SizedPlan, cluster: Cluster) -> StepTimes:
        """Durations in seconds: of every stage's layers, gather, reduction and messages, of the
        reduction over the replicas, and of moving what is updated whole, but not of updates."""
        layout, ranks = plan.layout, plan.schedule.stage_rank
        among = group_of(cluster, layout, *layout.shard_axes)
        replicas = group_of(cluster, layout, "replicate")
        width, sent = element_bytes(plan.precision), element_bytes(plan.reduce_dtype)
        stages = []
        passes = self.passes(plan, cluster)
        for stage, (begin, end) in enumerate(pairwise(plan.cuts)):
            forward, input_, weight = passes[stage]
            parameters = sum(layer.parameters for layer in self.sizes[begin:end])
            cost = StageCost(
                forward=forward,
                backward_input=input_,
                backward_weight=weight,
                unshard=gather_s(cluster, among, parameters * width),
                reduce_grad=gather_s(cluster, among, parameters * sent),
                parts=plan.parts_of(stage),
                reduce_replicas=all_reduce_s(cluster, replicas, parameters * _FP32 / layout.shards),
            )
            if stage + 1 < len(ranks):
                moved = output_bytes(self.sizes[end - 1], plan.precision)
                here, there = ranks[stage], ranks[stage + 1]
                cost = replace(
                    cost,
                    transfer=transfer_s(cluster, layout, source=here, target=there, size=moved),
                )
            if plan.offloaded_stages:
                sent_s = self._sent(plan, stage) / host_of(cluster).rate
                cost = replace(cost, store=sent_s, load=sent_s)
            stages.append(cost)
        zero = layout.replicate if layout.replicate_zero else 1
        slowest = among if zero == 1 else replicas
        for rank in range(layout.pp):
            held = plan.schedule.stages_of(rank)
            bounds = (plan.cuts[stage : stage + 2] for stage in held)
            whole = sum(state.whole for begin, end in bounds for state in self.states[begin:end])
            if plan.step_end.gathers_whole:
                # A rank sends its share except what it keeps: to one rank what a gather sends on.
                moved_s = gather_s(cluster, slowest, whole / layout.shards / zero)
                stages[held[0]] = replace(
                    stages[held[0]], gather_whole=2 * moved_s, gather_updated=moved_s
                )
        return StepTimes(
            stages=tuple(stages),
            extras=(StageExtras(waits=waits_s(cluster, among)),) * len(stages),
            limit_s=0.0,
            overlap_slowdown=cluster.device.overlap_slowdown,
            network_share=host_network_share(layout, cluster) if plan.offloaded_stages else 0.0,
        )

    def memory(self, plan: SizedPlan, cluster: Cluster) -> StepBytes:
        """Bytes of every stage."""
        return StepBytes(
            memory=tuple(
                replace(self._of_stage(plan, begin, end), sent=int(self._sent(plan, stage)))
                for stage, (begin, end) in enumerate(pairwise(plan.cuts))
            ),
            resident_gradients=program_named(plan.program).resident_gradients,
            flat_chunks=True,
            host_limit=host_limit(plan, cluster),
        )

    def _of_stage(self, plan: SizedPlan, begin: int, end: int) -> StageMemory:
        layout, sizes, width = plan.layout, self.sizes, element_bytes(plan.precision)
        parameters = sum(layer.parameters for layer in sizes[begin:end])
        sums = sum(state.sums for state in self.states[begin:end])
        ends = sum(self.states[i].sums for i in {0, len(sizes) - 1} & set(range(begin, end)))
        rows = layout.replicate if layout.replicate_zero else 1  # that divide the optimizer's work
        masters = float(parameters * _FP32)
        if plan.precision != "fp32" and rows > 1:
            masters = masters / rows + parameters * width
        kept, again = self._kept(plan, begin, end)
        out = output_bytes(sizes[end - 1], plan.precision)
        out /= plan.logits_slices if end == len(sizes) else 1
        loss = 2 * _FP32 / width * out if end == len(sizes) else 0.0
        boundary = output_bytes(sizes[begin - 1], plan.precision) if begin else 0.0
        sizes_by_kind = {
            "parameters": masters / layout.shards,
            "optimizer": sum(s.optimizer for s in self.states[begin:end]) / layout.shards / rows,
            "gradients": sums / layout.shards,
            # The values and gradients that this rank updates whole; it sends as much.
            "whole": 4 * sum(s.whole for s in self.states[begin:end]) / layout.shards / rows
            if plan.step_end.gathers_whole
            else 0.0,
            "unsharded": parameters * width if gathers(plan) else 0.0,
            "unsharded_gradients": sums if layout.shards > 1 else 0.0,
            "early_gradients": ends if layout.shards > 1 else 0.0,
            "activations": kept,
            "deferred": kept,
            "boundary": boundary,
            "forward": kept + out + loss,
            "backward_input": kept + again + out + loss,
            "full_backward": kept + again + out + loss,
        }
        of_none = dict.fromkeys(StageMemory.__dataclass_fields__, 0)
        return StageMemory(**of_none | {name: int(size) for name, size in sizes_by_kind.items()})

    def _sent(self, plan: SizedPlan, stage: int) -> float:
        """What a stage sends to the host of one microbatch."""
        first = max(plan.cuts[stage], 1)
        return self._kept(plan, first, first + plan.offloaded_per_stage[stage])[0]

    def _kept(self, plan: SizedPlan, begin: int, end: int) -> tuple[float, float]:
        """What a stage keeps of one microbatch, and what it recomputes at a time: of a last layer
        in slices the inputs, and one slice."""
        share, of_slice = element_bytes(plan.precision) / _FP32, 0.0
        saved = [share * layer.saved_bytes for layer in self.sizes]
        if plan.logits_slices > 1 and end == len(saved):
            of_slice = saved[-1] / plan.logits_slices
            saved[-1] = output_bytes(self.sizes[-2:][0], plan.precision)
        if plan.recompute != "full":
            return sum(saved[begin:end]), of_slice
        inner = range(max(begin, 1), min(end, len(saved) - 1))
        kept = sum(saved[i] for i in range(begin, end) if i not in inner)
        kept += sum(output_bytes(self.sizes[i - 1], plan.precision) for i in inner)
        return kept, max(of_slice, *(saved[i] for i in inner), 0.0)
