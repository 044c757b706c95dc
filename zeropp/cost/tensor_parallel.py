"""Seconds of tensor-parallel collectives of one microbatch, as far as compute waits for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from zeropp.cluster import Cluster
from zeropp.cost.blocks import Work
from zeropp.cost.collectives import all_reduce_s, gather_s, group_of
from zeropp.cost.kernels import element_bytes

if TYPE_CHECKING:
    from zeropp.plan import Plan


@dataclass(frozen=True)
class TensorTimes:
    """Seconds of tensor-parallel collectives, one microbatch: ``one`` of a boundary, and of a
    block's forward, backward and recomputation."""

    one: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    again: float = 0.0


def tensor_times(plan: Plan, cluster: Cluster, work: Work) -> TensorTimes:
    """Tensor-parallel collectives.

    Two all-reduces of a boundary each way (arXiv 1909.08053, section 3); under sequence
    parallelism a reduce-scatter and an all-gather take the place of each (arXiv 2205.05198,
    section 4.2.2), and the backward gathers the inputs of both column-parallel products again,
    hidden behind a product but for the slowdown.
    """
    if plan.layout.tp == 1:
        return TensorTimes()
    size = work.tokens * work.shape.hidden * element_bytes(work.precision)
    among = group_of(cluster, plan.layout, "tp")
    one, more = all_reduce_s(cluster, among, size), 0.0
    if work.sequence_parallel:
        half = gather_s(cluster, among, size)
        one, more = 2 * half, 2 * half * cluster.device.overlap_slowdown
    if (
        work.program.overlap_tensor and work.sequence_parallel
    ):  # the first slice is exposed, the others slow products
        one *= 1 / plan.layout.tp + cluster.device.overlap_slowdown
    again = 2 * one if plan.recompute == "full" else 0.0
    return TensorTimes(one, 2 * one, 2 * one + more, again)
