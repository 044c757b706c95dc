"""Devices, links and clusters as data; the numbers come from ``conf/cluster``.

Facts (peaks, sizes, link rates) and measured constants (rates that kernels reach, latencies) sit
side by side; ``docs/simulator.md`` says where each came from. There is one set of constants per
device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from zeropp.ranges import AT_LEAST_0, AT_LEAST_1, MORE_THAN_0

_STRICT = {"extra": "forbid"}


@dataclass(frozen=True)
class Device:
    """One accelerator. A peak of None means that it is not known, and then there is no MFU."""

    name: str
    memory_gib: Annotated[float, MORE_THAN_0]
    memory_bandwidth_gb_s: Annotated[float, MORE_THAN_0]
    matmul_bf16_tflops: Annotated[float, MORE_THAN_0]  # what the largest matrix products reach
    matmul_fp32_tflops: Annotated[float, MORE_THAN_0]
    peak_bf16_tflops: Annotated[float | None, MORE_THAN_0] = None  # dense
    peak_fp32_tflops: Annotated[float | None, MORE_THAN_0] = None  # dense, without TF32
    # Share of the bandwidth that element-wise kernels reach.
    memory_efficiency: Annotated[float, MORE_THAN_0] = 0.8
    # Fused attention's rate over matmul_bf16_tflops.
    attention_efficiency: Annotated[float, MORE_THAN_0] = 0.6
    # What a kernel takes beside its work: ramp-up, tail, gap.
    kernel_us: Annotated[float, AT_LEAST_0] = 5.0
    launch_us: Annotated[float, AT_LEAST_0] = 8.0  # the host's time to start one kernel
    # Multiprocessors: output tiles run in waves of this many.
    units: Annotated[int, AT_LEAST_1] = 108
    # Compute takes this share longer beside collectives.
    overlap_slowdown: Annotated[float, AT_LEAST_0] = 0.1
    # Context, libraries, communicators, fragmentation.
    reserved_gib: Annotated[float, AT_LEAST_0] = 4.0

    __pydantic_config__ = _STRICT

    def __hash__(self) -> int:
        """Of the name alone: a search asks for it millions of times. Those of one name are still
        told apart by all their fields."""
        return hash(self.name)

    @property
    def usable_bytes(self) -> int:
        """What tensors may take."""
        return int((self.memory_gib - self.reserved_gib) * 2**30)

    @property
    def is_cpu(self) -> bool:
        """Whether ranks are processes on CPUs, over gloo; else on GPUs, over NCCL."""
        return self.name == "cpu"


@dataclass(frozen=True)
class Link:
    """One direction of one GPU's link or of one NIC: nominal rate, and what is reached of it."""

    bandwidth_gb_s: Annotated[float, MORE_THAN_0]
    latency_us: Annotated[float, AT_LEAST_0]  # of a collective or message, once
    hop_us: Annotated[float, AT_LEAST_0] = 4.0  # of every further step of a ring or tree
    # Share of the rate that large messages reach.
    efficiency: Annotated[float, MORE_THAN_0] = 0.8

    __pydantic_config__ = _STRICT

    @property
    def rate(self) -> float:
        """Bytes per second that large messages reach."""
        return self.bandwidth_gb_s * 1e9 * self.efficiency


@dataclass(frozen=True)
class Cluster:
    """Nodes of equal GPUs: ``intra`` is one GPU's link inside a node, ``inter`` one NIC's link
    between nodes."""

    name: str
    device: Device
    gpus_per_node: Annotated[int, AT_LEAST_1]
    nics_per_node: Annotated[int, AT_LEAST_1]
    intra: Link
    inter: Link
    # Shares of the rate, by the number of ranks of a group inside a node.
    group_shares: tuple[Annotated[float, MORE_THAN_0], ...] = ()
    # In-switch reduction: all-reduce inside a node is faster by this factor.
    reduction_gain: Annotated[float, MORE_THAN_0] = 1.0

    __pydantic_config__ = _STRICT

    def __hash__(self) -> int:
        """Of the name alone: a search asks for it millions of times. Those of one name are still
        told apart by all their fields."""
        return hash(self.name)
