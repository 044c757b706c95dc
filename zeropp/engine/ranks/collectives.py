"""Process groups, the collectives that run in them, and messages between pipeline ranks.

Gathers and reductions have separate groups of the same ranks, because each runs in a lane of its
own (``zeropp.engine.ranks.lanes``), and the collectives of one group must come in the same order on
all ranks.

Messages: sends never block, and receives are posted early. In an NCCL process group all messages of
a rank may share one stream (they do if the job was initialised with a device). So in each group a
rank exchanges messages with only one other rank and in one direction: a message that waits for its
receiver delays neither compute nor messages of other pairs. Pairs that have no rank in common use
the same group, over all pipelines: two to six groups are enough for a job of any size. Messages of
one pair are matched by their order; the schedule's passes put receives in the order of the sends.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from zeropp.schedule.program import Schedule
from zeropp.types.layout import Layout
from zeropp.types.literals import Axis

# The names of these collectives since torch 2.13; older versions have only the other ones.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True, kw_only=True)
class DataGroups:
    """The groups that contain this rank; None for a group that would have only this rank.

    The ranks of ``gather`` and ``reduce`` divide parameters: they are those of the axes shard and
    context. The ranks of ``context`` exchange heads for tokens. ``world`` has all ranks; ``owners``
    those that divide the optimizer's work, where parameters are updated whole.
    """

    gather: dist.ProcessGroup | None
    reduce: dist.ProcessGroup | None
    replicate: dist.ProcessGroup | None
    world: dist.ProcessGroup | None
    owners: dist.ProcessGroup | None
    context: dist.ProcessGroup | None


def make_groups(
    layout: Layout,
    device: torch.device,
    timeout: timedelta | None,
    undo: ExitStack,
    *,
    owners: bool = False,
) -> DataGroups:
    """Make the groups of all shards and replicas, whatever their numbering; collective over all
    ranks, because torch names groups by how many a rank has made.

    ``timeout``: how long a collective waits for its peers; None: torch's default. ``undo`` collects
    how to destroy the groups, which all their ranks must do. ``owners``: also the group in which
    ranks share whole parameters out.
    """
    backend = backend_of(device)
    make = partial(_group, layout, backend=backend, timeout=timeout)
    sharding: list[Axis] = ["shard", "context"]
    dividing: list[Axis] = [*sharding, "replicate"] if layout.replicate_zero else sharding
    groups = DataGroups(
        gather=make(sharding, name="zeropp gathers"),
        reduce=make(sharding, name="zeropp reductions"),
        replicate=make(["replicate"], name="zeropp replicas"),
        world=dist.new_group(timeout=timeout, backend=backend, group_desc="zeropp sums")
        if layout.world > 1
        else None,
        owners=make(dividing, name="zeropp owners") if owners else None,
        context=make(["context"], name="zeropp sequences") if layout.context > 1 else None,
    )
    for group in vars(groups).values():
        if group is not None:  # NCCL connects a group in its first collective, and waits there
            undo.callback(dist.destroy_process_group, group)
            dist.all_reduce(torch.zeros(1, device=device), group=group)
    undo.callback(vars(groups).clear)  # else it would keep them, and peers would wait for this rank
    return groups


def connect_lazily(ranks: int) -> None:
    """With many ranks, gloo connects two when they first talk: a process may open 1,024 files."""
    if ranks >= 256:
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")


def backend_of(device: torch.device) -> str:
    """The backend that the default process group uses for tensors on a device."""
    backends = dict(entry.split(":") for entry in dist.get_backend_config().split(","))
    return backends[device.type]


def _group(
    layout: Layout, axes: Sequence[Axis], *, backend: str, name: str, timeout: timedelta | None
) -> dist.ProcessGroup | None:
    """The group of the ranks that differ from this one only on some axes, in ascending order."""
    alike: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
    for rank in range(layout.world):
        place = layout.coordinates(rank)
        alike[tuple(place[axis] for axis in place if axis not in axes)].append(rank)
    group: dist.ProcessGroup | None = None
    if len(alike) < layout.world:
        group, _ = dist.new_subgroups_by_enumeration(  # type: ignore[no-untyped-call]
            list(alike.values()), timeout=timeout, backend=backend, group_desc=name
        )
    return group


Pair = tuple[int, int]  # pipeline ranks: source, target


class Channels:
    """The messages between the ranks of this rank's pipeline. All ranks must construct it.

    ``timeout`` is how long a message waits for its peer; None means torch's default. ``undo``
    collects how to destroy the process groups, as in ``make_groups``.
    """

    def __init__(
        self,
        pairs: Iterable[Pair],
        layout: Layout,
        device: torch.device,
        timeout: timedelta | None,
        undo: ExitStack,
    ) -> None:
        self.device = device
        self._rank = layout.coordinates(dist.get_rank())["pp"]
        self._global_ranks = layout.pipeline(dist.get_rank())
        self._groups: dict[Pair, dist.ProcessGroup] = {}
        self._sends: list[tuple[Tensor, dist.Work]] = []
        backend, options = backend_of(device), None
        if backend == "nccl":  # messages go before compute, as they wait for peers
            options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
            options.config.max_ctas = 4  # a few thread blocks fill a link
        for apart in disjoint(pairs):
            group = dist.new_group(timeout=timeout, backend=backend, pg_options=options)
            undo.callback(dist.destroy_process_group, group)
            self._groups |= {pair: group for pair in apart if self._rank in pair}
        undo.callback(self._sends.clear)
        undo.callback(self._groups.clear)  # as in ``make_groups``
        for source, target in self._groups:
            self._connect(source, target, device)

    def send(self, tensor: Tensor, target: int) -> None:
        """Start to send a tensor, which is kept alive until the message has left."""
        group = self._groups[self._rank, target]
        tensor = as_sent(tensor)
        work = dist.isend(tensor, self._global_ranks[target], group=group)
        assert work is not None
        self._sends.append((tensor, work))
        # Free tensors whose messages have left, oldest first: messages of a pair end in order.
        while self._sends and self._sends[0][1].is_completed():
            self._sends.pop(0)[1].wait()

    def receive(self, tensor: Tensor, source: int) -> dist.Work:
        """Post a receive into ``tensor``, which is contiguous; wait for the result before reading
        it."""
        group = self._groups[source, self._rank]
        work = dist.irecv(as_sent(tensor), self._global_ranks[source], group=group)
        assert work is not None
        return work

    def drain(self) -> None:
        """Wait until all messages have left."""
        for _, work in self._sends:
            work.wait()
        self._sends.clear()

    def _connect(self, source: int, target: int, device: torch.device) -> None:
        """Send one message through a pair, as NCCL connects on first use and waits there."""
        group = self._groups[source, target]
        probe = torch.zeros(1, device=device)
        if self._rank == source:
            dist.send(probe, self._global_ranks[target], group=group)
        else:
            dist.recv(probe, self._global_ranks[source], group=group)


def as_sent(tensor: Tensor) -> Tensor:
    """The values in the order of memory, as real numbers. torch may keep a conjugate or a negative
    of numbers as a mere note, which no message would carry."""
    tensor = tensor.resolve_conj().resolve_neg().contiguous()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def disjoint(pairs: Iterable[Pair]) -> list[list[Pair]]:
    """Divide pairs into lists in which no rank appears twice; each pair, in order, goes into the
    first list that allows it."""
    lists: list[list[Pair]] = []
    for pair in sorted(pairs):
        for apart in lists:
            if not any(set(pair) & set(other) for other in apart):
                apart.append(pair)
                break
        else:
            lists.append([pair])
    return lists


def new_group_in_each_pipeline(
    layout: Layout, members: Iterable[int], timeout: timedelta | None = None
) -> dist.ProcessGroup | None:
    """Make one group of these pipeline ranks per pipeline; returns the one with this rank, or None.

    Every rank must make every group: torch names a group by how many groups the rank has made
    before, so that ranks with other numbers of groups would not find each other.
    """
    ranks = [sorted(pipeline[member] for member in members) for pipeline in layout.pipelines()]
    group: dist.ProcessGroup | None
    group, _ = dist.new_subgroups_by_enumeration(ranks, timeout=timeout)  # type: ignore[no-untyped-call]
    return group


def neighbours(schedule: Schedule) -> set[tuple[int, int]]:
    """Ordered pairs of ranks between which messages go."""
    forward = {(one, other) for one, other in pairwise(schedule.stage_rank) if one != other}
    return forward | {(target, source) for source, target in forward}
