"""What DeepSpeed's ZeRO-3 sends and copies, and when (0.19.8, ``runtime/zero``).

Parameters are gathered tensor by tensor, or some of them together, on a stream of their own: ahead
of their use, as far as ``max_live_parameters`` allows it (``partitioned_param_coordinator.py``,
``fetch_sub_module``). Tensors together are copied out of one buffer (``partition_parameters.py``,
``AllGatherCoalescedHandle``). A tensor is kept from its forward to its backward if fewer than
``max_reuse_distance`` elements lie between. With ``zero_hpz_partition_size`` the first release of a
tensor in a step leaves a second copy, cut over this many ranks, from which all later gathers of the
step come (``_partition_param_sec``); the host waits for each of these copies.

A gradient is copied into a bucket, on another stream; the next one that does not fit in begins the
bucket's reduction: its tensors are joined, divided, and reduce-scattered (``stage3.py``,
``__avg_scatter_grads``). Behind a backward the host waits for the last one
(``independent_gradient_partition_epilogue``), and the next microbatch gathers anew. Reductions and
gathers have one network.

The host's time per tensor is not described: it has hooks for every module, and loops over all ranks
for every tensor that is joined with others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from zeropp.price.cluster import Cluster
from zeropp.price.kernels import element_bytes, stream_s
from zeropp.price.network import Group, gather_s, group, group_of, moved_s, waits_s
from zeropp.price.pieces import Work
from zeropp.price.programs import sent_bytes
from zeropp.schedule.plan import SizedPlan


class Exposed(NamedTuple):
    """Seconds of one microbatch in which compute waits in its forward and in its backward, and
    those of communication beside compute, which slow it."""

    forward: float
    backward: float
    hidden: float


class _Gather(NamedTuple):
    """A gather of ``tensors``; ``first`` is the index of the first one among those of a pass;
    ``before`` elements are used earlier."""

    first: int
    before: float
    tensors: list[float]


@dataclass
class _Microbatch:
    """Streams and network, as far as they have come in a microbatch, in seconds."""

    plan: SizedPlan
    cluster: Cluster
    work: Work
    near: bool = False  # parameters come from the second copy
    now: float = 0.0  # of compute
    network: float = 0.0  # is free from here on
    reduced: float = 0.0  # the end of the last reduction
    busy: float = 0.0  # of communication
    moving: float = 0.0  # the same without its waits
    bucket: int = 0  # the gradients in it
    filled: float = 0.0  # their elements

    def __post_init__(self) -> None:
        layout, program = self.plan.layout, self.work.program
        shards = group_of(self.cluster, layout, *layout.shard_axes)
        near = group(self.cluster, program.zero_hpz_partition_size, 1, layout.world)
        # Groups of ranks, with what their collectives wait.
        self.shard_group, self.near_group = (
            (among, waits_s(self.cluster, among)) for among in (shards, near)
        )
        self.state = program.state(self.plan.precision)
        self.element, self.sent = element_bytes(self.plan.precision), sent_bytes(self.plan, program)

    def run(
        self, tensors: Sequence[float], gathers: Iterator[_Gather], seconds: float, *, makes: int
    ) -> None:
        """A pass that uses tensors in this order, among which its compute is divided; the last
        ``makes`` of them have gradients then."""
        waiting, there, done = deque(gathers), dict[int, float](), 0.0
        total, live = sum(tensors), self.work.program.live_parameters
        for index, elements in enumerate(tensors):
            while waiting and waiting[0].before - done <= live:
                group = waiting.popleft()
                there[group.first] = self.gather(group.tensors, self.now if done else 0.0)
            self.now = max(self.now, there.get(index, 0.0)) + seconds * elements / total
            done += elements
            if index >= len(tensors) - makes:
                self.add(elements)

    def gather(self, tensors: Sequence[float], issued: float) -> float:
        """Gather tensors together; returns when they are there."""
        moved = sum(tensors) * self.element
        self.send(moved, issued, self.near_group if self.near else self.shard_group)
        copied_s = stream_s(self.work.device, 2 * moved, len(tensors)) if len(tensors) > 1 else 0.0
        return self.network + copied_s

    def send(self, moved: float, issued: float, among: tuple[Group, float]) -> None:
        """Gather or reduce-scatter this many bytes."""
        group, waits = among
        seconds = waits + moved_s(group, moved)
        self.network = max(self.network, issued) + seconds
        self.busy += seconds
        self.moving += seconds - waits

    def add(self, gradient: float) -> None:
        """A gradient is there: it is copied into the bucket if it fits in, and else cast."""
        if self.bucket and self.filled + gradient > self.state.bucket:
            self.reduce()
        self.bucket += 1
        self.filled += gradient
        if gradient <= self.state.bucket or self.sent != self.element:
            self.reduced = max(self.reduced, self.now) + stream_s(
                self.work.device, (self.element + self.sent) * gradient
            )

    def reduce(self) -> None:
        """Reduce the bucket: join its tensors, divide them, send them, and copy or add this rank's
        part to its sum."""
        device, sent = self.work.device, self.sent
        joined_s = stream_s(device, 2 * sent * self.filled * (1 + (self.bucket > 1)), 2)
        self.send(self.filled * sent, max(self.reduced, self.now) + joined_s, self.shard_group)
        part = self.filled / self.plan.layout.shards * (sent + 3 * self.state.gradients)
        self.reduced = self.network + stream_s(device, part, 2 * self.bucket)
        self.bucket, self.filled = 0, 0.0


def exposed_s(
    plan: SizedPlan,
    cluster: Cluster,
    work: Work,
    *,
    gradients: Sequence[float],
    forward_s: float,
    backward_s: float,
) -> Exposed:
    """What gathers and reductions add to a microbatch, on average. ``gradients`` are the elements
    of tensors in the order in which a backward has their gradients."""
    program, m = work.program, plan.num_microbatches
    ranks = program.zero_hpz_partition_size
    # The last gradient's tensor is tied to the one that a backward uses first.
    used = [*(gradients[-1:] if plan.shape.tied_embeddings else ()), *gradients]
    times = 2 + (plan.recompute != "none")  # what lies behind a tensor is used before its next use
    again, behind = [], 0.0
    for elements in used:
        again.append(times * behind >= program.live_parameters)
        behind += elements

    def alone(near: bool) -> Exposed:  # whether also the forward has the second copies
        steps = _Microbatch(plan, cluster, work, near)
        steps.run(used[::-1], _gathers(work, used[::-1], first=True), forward_s, makes=0)
        forward = steps.now - forward_s
        steps.near = ranks > 1
        steps.run(used, _gathers(work, used, again), backward_s, makes=len(gradients))
        steps.reduce()
        exposed = max(steps.now, steps.reduced) - forward_s - backward_s
        hidden = max(0.0, steps.busy - exposed) * steps.moving / steps.busy
        return Exposed(forward, exposed - forward, hidden)

    later = alone(ranks > 1)
    if ranks == 1:
        return later
    first = alone(False)
    cut = [elements for elements in gradients if elements > program.persistent]
    moved = 3 * element_bytes(plan.precision) * sum(cut) / ranks  # cleared, read and written
    copied_s = stream_s(work.device, moved, 2 * len(cut)) + len(cut) * work.launch_s
    means = [(one + (m - 1) * more) / m for one, more in zip(first, later, strict=True)]
    return Exposed(means[0] + copied_s / m, *means[1:])


def _gathers(
    work: Work, used: Sequence[float], wanted: Sequence[bool] = (), *, first: bool = False
) -> Iterator[_Gather]:
    """The gathers of a pass, for the tensors that are ``wanted`` (by default, all) and do not stay
    gathered. ``first``: the first one is gathered when it is needed, and so alone."""
    before, group, size = 0.0, None, 0.0
    persistent, most = work.program.persistent, work.program.gathered_together
    for index, elements in enumerate(used):
        if elements > persistent and (not wanted or wanted[index]):
            if group is None:
                group, size = _Gather(index, before, []), 0.0
            group.tensors.append(elements)
            size += elements
            if size >= most or (first and not index):
                yield group
                group = None
        before += elements
    if group:
        yield group


def persistent_s(plan: SizedPlan, cluster: Cluster, work: Work, tensors: Sequence[float]) -> float:
    """Seconds in which tensors that stay gathered are gathered behind an update, each alone
    (``_post_step``; ``partition_parameters.py``, ``_allgather_params_coalesced``)."""
    among, element = (
        group_of(cluster, plan.layout, *plan.layout.shard_axes),
        element_bytes(plan.precision),
    )
    kept = [elements for elements in tensors if elements <= work.program.persistent]
    return sum(gather_s(cluster, among, elements * element) for elements in kept)
