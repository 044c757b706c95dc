"""Seconds of collectives and messages between the ranks of a layout.

The model is that of rings with a latency and a bandwidth (Thakur, Rabenseifner, Gropp 2005,
section 4): an all-gather or reduce-scatter of S bytes over n ranks moves (n-1)/n S through every
rank's link, an all-reduce twice that, and every step of the ring costs a hop, which is longer
between nodes than inside one, as in NCCL's own model (``src/graph/tuning.cc``). An all-reduce may
also use trees, as NCCL does (Sanders, Speck, Traeff 2009), with a logarithmic number of hops. So
larger messages reach a higher bandwidth. Between nodes the bottleneck is the node's NICs, which all
groups across nodes share, because they communicate at the same time.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import log2, prod

from zeropp.price.cluster import Cluster
from zeropp.types.layout import Layout
from zeropp.types.literals import Axis


@dataclass(frozen=True)
class Group:
    """Ranks that communicate: their number, the number of their nodes, and their bus bandwidth."""

    size: int
    nodes: int
    rate: float  # bytes per second through one rank's link (NCCL's bus bandwidth)


def axis_stride(layout: Layout, axis: Axis) -> int:
    """The difference of the global ranks of neighbours on an axis; raises KeyError for an axis that
    the layout does not have."""
    stride = 1
    for name, size in reversed(layout.axes):
        if name == axis:
            return stride
        stride *= size
    raise KeyError(axis)


@lru_cache(maxsize=4096)
def group_of(cluster: Cluster, layout: Layout, *axes: Axis) -> Group:
    """The group of one axis, or of several together."""
    sizes = dict(layout.axes)
    node = min(cluster.gpus_per_node, layout.world)
    local = prod(max(1, min(sizes[axis], node // axis_stride(layout, axis))) for axis in axes)
    return _group(cluster, prod(sizes[axis] for axis in axes), local, node)


def group(cluster: Cluster, size: int, stride: int, world: int) -> Group:
    """The group of ``size`` ranks that are ``stride`` apart, in a job of ``world`` ranks."""
    node = min(cluster.gpus_per_node, world)
    return _group(cluster, size, max(1, min(size, node // stride)), node)


def _group(cluster: Cluster, size: int, local: int, node: int) -> Group:
    """A group with ``local`` ranks on each node of ``node`` ranks."""
    nodes = -(-size // local)
    inside = cluster.intra.rate
    if cluster.group_shares:
        inside *= cluster.group_shares[min(local, len(cluster.group_shares)) - 1]
    if nodes == 1:
        return Group(size, 1, inside)
    share = cluster.nics_per_node * cluster.nic_rate * local / node
    return Group(size, nodes, share if local == 1 else min(inside, share))


def gather_s(cluster: Cluster, group: Group, total: float) -> float:
    """Seconds of an all-gather to, or a reduce-scatter of, ``total`` bytes per rank."""
    return waits_s(cluster, group) + moved_s(group, total)


def all_to_all_s(cluster: Cluster, group: Group, total: float) -> float:
    """Seconds of an all-to-all of ``total`` bytes per rank. Each other rank gets an equal
    part: a message to each of them, all at once (NCCL 2.28, ``ncclAlltoAll``, which is a group of
    sends and receives). Between nodes every message takes its sender's share of the NICs."""
    local = group.size // group.nodes
    inside, beyond = (local - 1) / group.size, (group.size - local) / group.size
    inside_s = total * inside / (group.rate if group.nodes == 1 else cluster.intra.rate)
    beyond_s = total * beyond / (group.rate / local) if group.nodes > 1 else 0.0
    return start_s(cluster, group) + hops_s(cluster, group) + max(inside_s, beyond_s)


def all_reduce_s(cluster: Cluster, group: Group, total: float) -> float:
    """Seconds of an all-reduce of ``total`` bytes per rank; inside a node the switch may reduce."""
    if group.size == 1:
        return 0.0
    gain = cluster.reduction_gain if group.nodes == 1 else 1.0
    return all_reduce_waits_s(cluster, group) + 2 * moved_s(group, total) / gain


def all_reduce_waits_s(cluster: Cluster, group: Group) -> float:
    """Seconds of an all-reduce in which a rank only waits for its next bytes."""
    if group.size == 1:
        return 0.0
    ring = 2 * hops_s(cluster, group)
    local = group.size // group.nodes
    tree = 2 * (local - 1) * cluster.intra.hop_us * 1e-6
    tree += 2 * log2(group.nodes) * cluster.inter.hop_us * 1e-6
    return start_s(cluster, group) + min(ring, tree)


def transfer_s(cluster: Cluster, layout: Layout, *, source: int, target: int, size: float) -> float:
    """Seconds of a message of ``size`` bytes between two pipeline ranks, while all ranks of a node
    send theirs."""
    if source == target:
        return 0.0
    return message_s(
        cluster,
        axis_stride(layout, "pp"),
        layout.world,
        crosses=crosses_nodes(cluster, layout, source, target),
        size=size,
    )


def message_s(cluster: Cluster, stride: int, world: int, *, crosses: bool, size: float) -> float:
    """Seconds of a message between ranks of a pipeline that are ``stride`` apart, as in
    ``transfer_s``; ``crosses``: whether they are on different nodes."""
    if not crosses:
        return cluster.intra.latency_us * 1e-6 + size / group(cluster, 2, stride, world).rate
    sharing = min(cluster.gpus_per_node, stride, world)
    rate = min(cluster.nic_rate, cluster.nics_per_node * cluster.nic_rate / sharing)
    return cluster.inter.latency_us * 1e-6 + size / rate


def crosses_nodes(cluster: Cluster, layout: Layout, source: int, target: int) -> bool:
    """Whether two pipeline ranks are on different nodes."""
    stride, node = axis_stride(layout, "pp"), cluster.gpus_per_node
    return (source * stride) // node != (target * stride) // node


def start_s(cluster: Cluster, group: Group) -> float:
    """Seconds until a collective, or a message inside a group, begins to move bytes."""
    return (cluster.intra if group.nodes == 1 else cluster.inter).latency_us * 1e-6


def waits_s(cluster: Cluster, group: Group) -> float:
    """Seconds of an all-gather or reduce-scatter in which a rank only waits for its next bytes."""
    if group.size == 1:
        return 0.0
    return start_s(cluster, group) + hops_s(cluster, group)


def hops_s(cluster: Cluster, group: Group) -> float:
    """Seconds of the hops with which a message goes once round a ring, one fewer than its ranks."""
    inside = (group.size - group.nodes) * cluster.intra.hop_us
    return (inside + (group.nodes - 1) * cluster.inter.hop_us) * 1e-6


def moved_s(group: Group, total: float) -> float:
    """Seconds in which an all-gather or reduce-scatter of ``total`` bytes per rank moves them."""
    return (group.size - 1) / group.size * total / group.rate
