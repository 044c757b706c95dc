"""Seconds of a layer that is known by its operators, which a walk over a user's model records.

In: the operators of one microbatch, a device, and the program whose engine runs them. Out: the
seconds of the layer's forward, input gradient and weight gradient. Every operator has the price
that it has in the suite's models (``zeropp.price.kernels``), whose operators are known by the
model's shape. On these models the prices of stages agree to 2 %, but for a stage of the embedding
alone (``tests/gloo/test_layer_prices.py``).
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from zeropp.price.cluster import Device
from zeropp.price.kernels import (
    element_bytes,
    fused_attention_backward_s,
    fused_attention_s,
    matmul_s,
    stream_s,
)
from zeropp.price.pieces import KernelSeconds, PassTimes, accumulation_bytes, passes_of
from zeropp.price.programs import Program
from zeropp.types.operators import Gradient, LayerOperators, Product

if TYPE_CHECKING:
    from zeropp.types.literals import Precision, Recompute


@lru_cache(maxsize=4096)
def passes_of_layer(
    layer: LayerOperators,
    device: Device,
    program: Program,
    precision: Precision,
    recompute: Recompute,
) -> PassTimes:
    """Seconds of one layer's passes for one microbatch."""
    element, gain = element_bytes(precision) * program.traffic_factor, program.attention_factor
    forwards = [kernel.forward for kernel in layer.elementwise if kernel.forward]
    backwards = _backwards(layer, "input")
    weights = _gradients_s(layer, "weight", device, precision)
    moved = sum(element * elements for elements in _backwards(layer, "weight"))
    moved += accumulation_bytes(program, precision) * layer.trained
    adding = len(weights) + len(_backwards(layer, "weight"))
    kernels = KernelSeconds(
        products=sum(_forward_s(product, device, precision) for product in layer.products),
        transposed=sum(_gradients_s(layer, "input", device, precision)),
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
        elementwise=stream_s(device, element * sum(forwards), len(forwards)),
        elementwise_backward=stream_s(device, element * sum(backwards), len(backwards)),
        accumulation=stream_s(device, moved, adding),
    )
    host_s = layer.launches * device.launch_us * program.launch_factor * 1e-6
    in_line = program.blocking_launches or device.is_cpu
    return passes_of(kernels, program, recompute, host_s=host_s, in_line=in_line)


def _backwards(layer: LayerOperators, gradient: Gradient) -> list[int]:
    """The elements that each kernel moves which computes such gradients."""
    return [
        kernel.backward
        for kernel in layer.elementwise
        if kernel.gradient == gradient and kernel.backward
    ]


def _forward_s(product: Product, device: Device, precision: Precision) -> float:
    m, k, n = product.m, product.k, product.n
    return matmul_s(device, precision, m=m, k=k, n=n, batch=product.batch)


def _gradients_s(
    layer: LayerOperators, gradient: Gradient, device: Device, precision: Precision
) -> list[float]:
    """The seconds of each product that computes such a gradient of a product's factor."""
    seconds = []
    for product in layer.products:
        m, k, n, batch = product.m, product.k, product.n, product.batch
        if product.left == gradient:
            seconds.append(matmul_s(device, precision, m=m, k=n, n=k, batch=batch))
        if product.right == gradient:
            seconds.append(matmul_s(device, precision, m=k, k=m, n=n, batch=batch))
    return seconds
