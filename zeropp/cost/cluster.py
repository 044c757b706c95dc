"""Devices, links and clusters as data; the numbers come from ``conf/cluster``."""

from __future__ import annotations

from dataclasses import dataclass

_STRICT = {"extra": "forbid"}


@dataclass(frozen=True)
class Device:
    """One accelerator. A peak of None means that it is not known, and then there is no MFU."""

    name: str
    memory_gib: float
    memory_bandwidth_gb_s: float
    peak_bf16_tflops: float | None = None  # dense
    peak_fp32_tflops: float | None = None  # dense, without TF32

    __pydantic_config__ = _STRICT


@dataclass(frozen=True)
class Link:
    """One direction of one GPU's link (or of one NIC): bytes a second that messages can reach."""

    bandwidth_gb_s: float
    latency_us: float

    __pydantic_config__ = _STRICT


@dataclass(frozen=True)
class Cluster:
    """Nodes of equal GPUs: ``intra`` inside a node (a GPU), ``inter`` between nodes (a NIC)."""

    name: str
    device: Device
    gpus_per_node: int
    nics_per_node: int
    intra: Link
    inter: Link

    __pydantic_config__ = _STRICT
