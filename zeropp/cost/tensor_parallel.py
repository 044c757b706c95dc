"""Seconds of tensor-parallel collectives per microbatch for which compute waits."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from zeropp.cluster import Cluster
from zeropp.cost.blocks import Work
from zeropp.cost.collectives import Group, all_reduce_s, gather_s, group_of
from zeropp.cost.kernels import element_bytes, stream_s

if TYPE_CHECKING:
    from zeropp.plan import SizedPlan


@dataclass(frozen=True, kw_only=True)
class TensorTimes:
    """Seconds of tensor-parallel collectives per microbatch: of ``one`` collective of hidden
    states, of a block's forward, backward and recomputation (``again``), and of the gathering of
    the ``logits``, where the loss is not split."""

    one: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    again: float = 0.0
    logits: float = 0.0


def tensor_times(plan: SizedPlan, cluster: Cluster, work: Work) -> TensorTimes:
    """The exposed seconds of tensor-parallel collectives.

    A block has two all-reduces of its hidden states in the forward and two in the backward (arXiv
    1909.08053, section 3). With sequence parallelism a reduce-scatter and an all-gather replace
    each of them (arXiv 2205.05198, section 4.2.2), and the backward gathers the inputs of both
    column-parallel products again; a product hides that gather, but is slowed by it. Gathered
    logits are copied twice: into one tensor, and to make it contiguous.
    """
    if plan.layout.tp == 1:
        return TensorTimes()
    return _exposed(cluster, group_of(cluster, plan.layout, "tp"), work)


@lru_cache(maxsize=4096)
def _exposed(cluster: Cluster, among: Group, work: Work) -> TensorTimes:
    size = work.tokens * work.shape.hidden * element_bytes(work.precision)
    one, more = all_reduce_s(cluster, among, size), 0.0
    if work.sequence_parallel:
        half = gather_s(cluster, among, size)
        one, more = 2 * half, 2 * half * cluster.device.overlap_slowdown
    if (
        work.program.overlap_tensor and work.sequence_parallel
    ):  # the first slice is exposed, the others slow products
        one *= 1 / work.tp + cluster.device.overlap_slowdown
    again = 2 * one if work.recompute == "full" else 0.0
    if work.program.split_gate and work.shape.gates == 2 and not work.sequence_parallel:
        more += one
    logits = _logits_s(cluster, among, work)
    return TensorTimes(
        one=one, forward=2 * one, backward=2 * one + more, again=again, logits=logits
    )


def _logits_s(cluster: Cluster, among: Group, work: Work) -> float:
    """Seconds in which the logits of a microbatch are gathered and copied."""
    if work.program.vocab_parallel:
        return 0.0
    size = work.tokens * work.shape.vocab * element_bytes(work.precision)
    return gather_s(cluster, among, size) + stream_s(cluster.device, 4.0 * size, kernels=2)
