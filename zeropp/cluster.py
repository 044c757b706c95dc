"""Devices, links and clusters as data; the numbers come from ``conf/cluster``.

Facts (peaks, sizes, link rates) and measured constants (rates that kernels reach, latencies) sit
side by side; ``docs/simulator.md`` says where each came from. One set of constants a device.
"""

from __future__ import annotations

from dataclasses import dataclass

_STRICT = {"extra": "forbid"}


@dataclass(frozen=True)
class Device:
    """One accelerator. A peak of None means that it is not known, and then there is no MFU."""

    name: str
    memory_gib: float
    memory_bandwidth_gb_s: float
    matmul_bf16_tflops: float  # what the largest matrix products reach
    matmul_fp32_tflops: float
    peak_bf16_tflops: float | None = None  # dense
    peak_fp32_tflops: float | None = None  # dense, without TF32
    memory_efficiency: float = 0.8  # share of the bandwidth that element-wise kernels reach
    attention_efficiency: float = 0.6  # fused attention's rate over matmul_bf16_tflops
    kernel_us: float = 5.0  # what a kernel takes beside its work: ramp-up, tail, gap
    launch_us: float = 8.0  # the host's time to start one kernel
    units: int = 108  # multiprocessors: output tiles run in waves of this many
    overlap_slowdown: float = 0.1  # compute takes this share longer beside collectives
    reserved_gib: float = 4.0  # context, libraries, communicators, fragmentation

    __pydantic_config__ = _STRICT

    @property
    def usable_bytes(self) -> int:
        """What tensors may take."""
        return int((self.memory_gib - self.reserved_gib) * 2**30)


@dataclass(frozen=True)
class Link:
    """One direction of one GPU's link (or of one NIC): nominal rate and what is reached of it."""

    bandwidth_gb_s: float
    latency_us: float  # of a collective or message, once
    hop_us: float = 4.0  # of every further step of a ring or tree
    efficiency: float = 0.8  # share of the rate that large messages reach

    __pydantic_config__ = _STRICT

    @property
    def rate(self) -> float:
        """Bytes a second that large messages reach."""
        return self.bandwidth_gb_s * 1e9 * self.efficiency


@dataclass(frozen=True)
class Cluster:
    """Nodes of equal GPUs: ``intra`` inside a node (a GPU), ``inter`` between nodes (a NIC)."""

    name: str
    device: Device
    gpus_per_node: int
    nics_per_node: int
    intra: Link
    inter: Link
    group_shares: tuple[float, ...] = ()  # of the rate, by ranks of a group inside a node
    reduction_gain: float = 1.0  # in-switch reduction: all-reduce inside a node is this faster

    __pydantic_config__ = _STRICT
