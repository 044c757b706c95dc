"""Seconds of one kernel on one device: matrix products, attention, and element-wise passes over
memory.

A product is limited by the rate that the device reaches or by memory, whichever is slower, and
takes a fixed time in addition. Its output tiles run in waves over the multiprocessors (NVIDIA,
"Matrix Multiplication Background User's Guide", tile and wave quantization): if the last wave is
only partly filled, the rest of it is wasted. Libraries split tiles to reduce that loss, so half of
it is counted.
"""

from __future__ import annotations

from math import ceil

from zeropp.price.cluster import Device
from zeropp.types.literals import Precision
from zeropp.types.operators import Attention

TILE = (128, 128)
# The share of the rate that products reach if a side is no multiple of 32: tensor cores read
# rows in groups of bytes (the same guide, "alignment"). It is what runs of hidden size 14,400 with
# TP 8, whose slices are 1,800 wide, take more than those of 13,824 on the same machine
# (results/published/deepspeed_pipelines.csv); multiples of 32 were measured to reach the whole rate
# (1,376 in results/published/product_times.csv).
MISALIGNED = 0.5
ALIGNED = 32  # a side that is a multiple of it reaches the whole rate
# Fused attention computes whole square tiles on the diagonal; causal attention needs half of them
# (arXiv 2307.08691, section 3.1.1).
ATTENTION_TILE = 128


def element_bytes(precision: Precision) -> int:
    """Bytes of one element of an activation."""
    return 4 if precision == "fp32" else 2


def matmul_rate(device: Device, precision: Precision) -> float:
    """The FLOP/s that the largest products reach; with "fp8" those of 16 bits."""
    tflops = device.matmul_fp32_tflops if precision == "fp32" else device.matmul_bf16_tflops
    return tflops * 1e12


def wave_efficiency(device: Device, m: int, n: int, batch: int = 1) -> float:
    """The share of the multiprocessors that the tiles of an [m, n] output keep busy."""
    if device.units == 1:
        return 1.0
    tiles = m * n * batch / (TILE[0] * TILE[1])
    rows, columns = ceil(m / TILE[0]), ceil(n / TILE[1])
    waves = ceil(rows * columns * batch / device.units)
    return 0.5 + 0.5 * min(1.0, tiles / (waves * device.units))


def alignment_efficiency(*sides: int) -> float:
    """The share of the rate that a product reaches by what its sides are multiples of."""
    return MISALIGNED if any(side % ALIGNED for side in sides) else 1.0


def matmul_s(
    device: Device,
    precision: Precision,
    *,
    m: int,
    k: int,
    n: int,
    batch: int = 1,
    gain: float = 1.0,
) -> float:
    """Seconds of ``batch`` products of [m, k] and [k, n] in one kernel, at ``gain`` times the rate
    of the precision."""
    flops = 2.0 * m * k * n * batch
    rate = gain * matmul_rate(device, precision) * wave_efficiency(device, m, n, batch)
    if device.units > 1:
        rate *= alignment_efficiency(m, k, n)
    element = element_bytes(precision) * batch
    output_s = device.exposed_output * _stream(device, element * m * n)
    moved_s = _stream(device, element * (m * k + k * n + m * n))
    return max(flops / rate + output_s, moved_s) + device.kernel_us * 1e-6


def fused_attention_s(
    device: Device, precision: Precision, attention: Attention, *, gain: float = 1.0
) -> float:
    """Seconds of the forward of attention in one kernel, at ``gain`` times the device's rate."""
    return _attention_products_s(device, precision, attention, gain) + device.kernel_us * 1e-6


def fused_attention_backward_s(
    device: Device, precision: Precision, attention: Attention, *, gain: float = 1.0
) -> float:
    """Seconds of the backward of attention in one kernel: five products for the forward's two
    (arXiv 2205.14135, section 3.1)."""
    return 2.5 * _attention_products_s(device, precision, attention, gain) + device.kernel_us * 1e-6


def _attention_products_s(
    device: Device, precision: Precision, attention: Attention, gain: float
) -> float:
    """Seconds of both products of a forward; causal attention computes half of them (arXiv
    2205.14135)."""
    scores = attention.heads * attention.queries * attention.keys
    rate = matmul_rate(device, precision) * device.attention_efficiency * gain
    rate *= min(1.0, 0.5 + attention.width / 256)  # narrow heads use the tensor cores less well
    if not attention.causal:
        return 4.0 * scores * attention.width / rate
    whole_tiles = 1 + ATTENTION_TILE / attention.queries
    return 2.0 * scores * attention.width * whole_tiles / rate


def stream_s(device: Device, moved: float, kernels: int = 1) -> float:
    """Seconds of ``kernels`` element-wise kernels that together read and write ``moved`` bytes."""
    return _stream(device, moved) + kernels * device.kernel_us * 1e-6


def _stream(device: Device, moved: float) -> float:
    return moved / (device.memory_bandwidth_gb_s * 1e9 * device.memory_efficiency)
