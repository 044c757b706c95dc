"""Seconds of one kernel on one device: matrix products, and element-wise passes over memory.

A product is limited by the rate that the device reaches or by memory, whichever is slower, and
takes a fixed time in addition. Its output tiles run in waves over the multiprocessors (NVIDIA,
"Matrix Multiplication Background User's Guide", tile and wave quantization): if the last wave is
only partly filled, the rest of it is wasted. Libraries split tiles to reduce that loss, so half of
it is counted.
"""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING

from zeropp.cluster import Device

if TYPE_CHECKING:
    from zeropp.literals import Precision

TILE = (128, 128)
UNALIGNED = 0.42  # share of the rate if a side is no multiple of 8 (same guide, alignment)


def element_bytes(precision: Precision) -> int:
    """Bytes of one element of an activation."""
    return 2 if precision == "bf16" else 4


def matmul_rate(device: Device, precision: Precision) -> float:
    """The FLOP/s that the largest products reach."""
    tflops = device.matmul_bf16_tflops if precision == "bf16" else device.matmul_fp32_tflops
    return tflops * 1e12


def wave_efficiency(device: Device, m: int, n: int, batch: int = 1) -> float:
    """The share of the multiprocessors that the tiles of an [m, n] output keep busy."""
    if device.units == 1:
        return 1.0
    tiles = m * n * batch / (TILE[0] * TILE[1])
    rows, columns = ceil(m / TILE[0]), ceil(n / TILE[1])
    waves = ceil(rows * columns * batch / device.units)
    return 0.5 + 0.5 * min(1.0, tiles / (waves * device.units))


def matmul_s(
    device: Device, precision: Precision, *, m: int, k: int, n: int, batch: int = 1
) -> float:
    """Seconds of ``batch`` products of [m, k] and [k, n] in one kernel."""
    flops = 2.0 * m * k * n * batch
    rate = matmul_rate(device, precision) * wave_efficiency(device, m, n, batch)
    if device.units > 1 and (m % 8 or k % 8 or n % 8):
        rate *= UNALIGNED
    element = element_bytes(precision) * batch
    output_s = device.exposed_output * _stream(device, element * m * n)
    moved_s = _stream(device, element * (m * k + k * n + m * n))
    return max(flops / rate + output_s, moved_s) + device.kernel_us * 1e-6


def stream_s(device: Device, moved: float, kernels: int = 1) -> float:
    """Seconds of ``kernels`` element-wise kernels that together read and write ``moved`` bytes."""
    return _stream(device, moved) + kernels * device.kernel_us * 1e-6


def _stream(device: Device, moved: float) -> float:
    return moved / (device.memory_bandwidth_gb_s * 1e9 * device.memory_efficiency)
