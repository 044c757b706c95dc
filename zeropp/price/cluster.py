"""Devices, links and clusters as data; the numbers are in ``conf/cluster``.

There are facts (peaks, sizes, link rates) and constants that were fitted to measurements (rates
that kernels reach, latencies), one set per device; ``docs/simulator.md`` has their sources.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Annotated, Any

from zeropp.types.data import DATA
from zeropp.types.layout import InfeasibleError
from zeropp.types.literals import AT_LEAST_0, AT_LEAST_1, MORE_THAN_0

_STRICT = {"extra": "forbid"}


NEWEST = 9999  # a year after that of all kernels
# The share of its nominal rate that a network between nodes reaches where nobody has measured it.
# Few are below the first, which is TCP's in place of RDMA (14 GB/s of 200: NVIDIA/nccl#1454), and
# none is above the second; results/published/nccl_busbw.csv has 0.5 to 0.96.
NETWORK_PRIOR = (0.1, 0.96)


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """What the kernels of a later generation of software reach on a device."""

    year: Annotated[int, AT_LEAST_1]  # the first year of software that has them
    matmul_bf16_tflops: Annotated[float, MORE_THAN_0]
    attention_efficiency: Annotated[float, MORE_THAN_0]

    __pydantic_config__ = _STRICT


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator. If a peak is None it is unknown, and no MFU is reported."""

    name: str
    memory_gib: Annotated[float, MORE_THAN_0]
    memory_bandwidth_gb_s: Annotated[float, MORE_THAN_0]
    power_w: Annotated[float | None, MORE_THAN_0] = None  # the board's limit
    matmul_bf16_tflops: Annotated[float, MORE_THAN_0]  # reached by the largest matrix products
    matmul_fp32_tflops: Annotated[float, MORE_THAN_0]
    # Those of later software, where they were seen to differ; all else is of the earlier one.
    newer: Kernels | None = None
    # The rate of 8-bit products over that of 16-bit ones; None: the device has none.
    eight_bit_gain: Annotated[float | None, MORE_THAN_0] = None
    peak_bf16_tflops: Annotated[float | None, MORE_THAN_0] = None  # dense
    peak_fp32_tflops: Annotated[float | None, MORE_THAN_0] = None  # dense, without TF32
    # The share of memory_bandwidth_gb_s that element-wise kernels reach.
    memory_efficiency: Annotated[float, MORE_THAN_0] = 0.8
    # Fused attention's rate as a share of matmul_bf16_tflops.
    attention_efficiency: Annotated[float, MORE_THAN_0] = 0.6
    # Fixed time per kernel on the device: ramp-up, tail and the gap before the next kernel.
    kernel_us: Annotated[float, AT_LEAST_0] = 5.0
    launch_us: Annotated[float, AT_LEAST_0] = 8.0  # the host's time to start one kernel
    # SM count (streaming multiprocessors): as many output tiles of a product run at a time.
    units: Annotated[int, AT_LEAST_1] = 108
    # The share of the time to write a matrix product's output that its arithmetic does not hide.
    exposed_output: Annotated[float, AT_LEAST_0] = 0.0
    # The share by which compute takes longer while a collective runs.
    overlap_slowdown: Annotated[float, AT_LEAST_0] = 0.1
    # Memory that tensors cannot have: CUDA context, libraries, communicators, fragmentation.
    reserved_gib: Annotated[float, AT_LEAST_0] = 4.0

    __pydantic_config__ = _STRICT

    def __hash__(self) -> int:
        """The hash of the name alone, because a search needs it millions of times. Equality still
        compares all fields."""
        return hash(self.name)

    @lru_cache(maxsize=64)  # noqa: B019 (a device is a few numbers, and there are few)
    def of_year(self, year: int) -> Device:
        """The device with the kernels that software of a year has."""
        if self.newer is None or year < self.newer.year:
            return self
        return replace(
            self,
            matmul_bf16_tflops=self.newer.matmul_bf16_tflops,
            attention_efficiency=self.newer.attention_efficiency,
            newer=None,
        )

    @property
    def usable_bytes(self) -> int:
        """Bytes that tensors may take: the device's memory without ``reserved_gib``."""
        return int((self.memory_gib - self.reserved_gib) * 2**30)

    @property
    def is_cpu(self) -> bool:
        """Whether ranks are processes on CPUs that use gloo; otherwise they use GPUs and NCCL."""
        return self.name == "cpu"

    @property
    def hides_collectives(self) -> bool:
        """Whether collectives run beside compute; on CPUs they take the cores that compute."""
        return self.overlap_slowdown < 1


@dataclass(frozen=True)
class Link:
    """One direction of one GPU's link or of one NIC: its nominal rate and what is reached of it."""

    bandwidth_gb_s: Annotated[float, MORE_THAN_0]
    latency_us: Annotated[float, AT_LEAST_0]  # once per collective or message
    hop_us: Annotated[float, AT_LEAST_0] = 4.0  # for every further step of a ring or tree
    # The share of the rate that large messages reach.
    efficiency: Annotated[float, MORE_THAN_0] = 0.8

    __pydantic_config__ = _STRICT

    @property
    def rate(self) -> float:
        """Bytes per second that large messages reach."""
        return self.bandwidth_gb_s * 1e9 * self.efficiency


class BusBandwidth:
    """Reads a number, or a line of nccl-tests' table: its out-of-place ``busbw``, which is the
    eighth column (size, count, type, redop, root, time, algbw, busbw, #wrong ...)."""

    @staticmethod
    def check(value: Any) -> Any:
        """The number that a text says; raises ValueError where it says none."""
        columns = value.split() if isinstance(value, str) else []
        if not columns:
            return value
        try:
            return float(columns[7 if len(columns) > 7 else 0])
        except ValueError:
            raise ValueError("must be GB/s, or a line of nccl-tests' table") from None

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> dict[str, Any]:
        """Pydantic's hook: read the text before the type is checked (see ``literals.Range``)."""
        check = {"type": "no-info", "function": self.check}
        return {"type": "function-before", "function": check, "schema": handler(source)}


@dataclass(frozen=True, kw_only=True)
class Host:
    """A node's own memory, and the link of one GPU to it, which copies in both directions."""

    bandwidth_gb_s: Annotated[float, MORE_THAN_0]  # of one direction
    # The share that large pinned copies reach: 24.8 of 32 GB/s on an A100 (nvbandwidth).
    efficiency: Annotated[float, MORE_THAN_0] = 0.78
    memory_gib: Annotated[float, MORE_THAN_0]  # of a node
    memory_share: Annotated[float, MORE_THAN_0] = 0.9  # that GPUs may take
    # Whether what a NIC sends and receives goes over the same link.
    shares_network: bool = False

    __pydantic_config__ = _STRICT

    @property
    def rate(self) -> float:
        """Bytes per second and direction."""
        return self.bandwidth_gb_s * 1e9 * self.efficiency


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Equal nodes of equal GPUs: ``intra`` is one GPU's link inside its node, ``inter`` is one
    NIC's link to other nodes, ``host`` is a node's memory; None: not known."""

    name: str
    device: Device
    gpus_per_node: Annotated[int, AT_LEAST_1]
    nics_per_node: Annotated[int, AT_LEAST_1]
    intra: Link
    inter: Link
    host: Host | None = None
    # The share of the link rate that a group of 1, 2, 3 ... ranks inside a node reaches; empty: 1.
    group_shares: tuple[Annotated[float, MORE_THAN_0], ...] = ()
    # The factor by which in-switch reduction makes an all-reduce inside a node faster.
    reduction_gain: Annotated[float, MORE_THAN_0] = 1.0
    # GB/s that large collectives of all GPUs of several nodes were measured to reach, nccl-tests'
    # ``busbw`` or a line of its table; None: nobody has, and ``inter.efficiency`` is assumed.
    busbw_gb_s: Annotated[float | None, BusBandwidth(), MORE_THAN_0] = None

    __pydantic_config__ = _STRICT

    def __hash__(self) -> int:
        """The hash of the name alone, because a search needs it millions of times. Equality still
        compares all fields."""
        return hash(self.name)

    @property
    def nic_rate(self) -> float:
        """Bytes per second that large messages between nodes reach through one NIC."""
        if self.busbw_gb_s is None:
            return self.inter.rate
        return self.busbw_gb_s * 1e9 / self.nics_per_node

    def with_busbw(self, gb_s: float) -> Cluster:
        """The cluster with another rate between nodes, under a name of its own, by which prices are
        kept."""
        return replace(self, name=f"{self.name} at {gb_s:g} GB/s", busbw_gb_s=gb_s)


def network_range(cluster: Cluster, num_gpus: int) -> tuple[Cluster, Cluster] | None:
    """The cluster with the slow and with the fast network that it may have (``NETWORK_PRIOR``);
    None where the rate was measured, or where a job of ``num_gpus`` stays in one node. The price
    itself is that of ``inter.efficiency``, which is what tuned networks reach."""
    if cluster.busbw_gb_s is not None or num_gpus <= cluster.gpus_per_node or cluster.device.is_cpu:
        return None
    nominal = cluster.nics_per_node * cluster.inter.bandwidth_gb_s
    low, high = (cluster.with_busbw(float(f"{share * nominal:.3g}")) for share in NETWORK_PRIOR)
    return low, high


def host_of(cluster: Cluster) -> Host:
    """A node's own memory; raises InfeasibleError, in one line, where it is not known."""
    if cluster.host is None:
        raise InfeasibleError(
            f"offload_blocks: cluster {cluster.name!r} says nothing of its hosts (give its `host:` "
            "as those of conf/cluster do, or take offload_blocks=0)"
        )
    return cluster.host


def cluster_of(name: str | Cluster) -> Cluster:
    """The description of a cluster that may be given by its name; raises InfeasibleError, in one
    line, where there is none."""
    if isinstance(name, Cluster):
        return name
    files = {path.stem: path for path in (DATA / "conf/cluster").glob("*.yaml")}
    if not isinstance(name, str) or name not in files:
        raise InfeasibleError(
            f"cluster={name!r}: must be one of {', '.join(sorted(files))}, or a zeropp.Cluster"
        )
    import yaml

    entry = yaml.safe_load(files[name].read_text(encoding="utf-8"))
    device: dict[str, Any] = entry["device"]
    if newer := device.get("newer"):
        device["newer"] = Kernels(**newer)
    parts = {
        "device": Device(**device),
        "intra": Link(**entry["intra"]),
        "inter": Link(**entry["inter"]),
        "host": Host(**entry["host"]) if "host" in entry else None,
        "group_shares": tuple(entry.get("group_shares", ())),
    }
    return Cluster(**{**entry, **parts})
