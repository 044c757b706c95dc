"""Process groups of a rank's shards and replicas, and the collectives that the engine runs there.

Gathers and reductions have separate groups of the same ranks, because each runs in a lane of its
own (``zeropp.engine.lanes``), and the collectives of one group must come in the same order on all
ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from zeropp.engine.together import Meeting
from zeropp.layout import Layout
from zeropp.literals import Axis

# The names of these collectives since torch 2.13; older versions have only the other ones.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(kw_only=True)
class DataGroups:
    """The groups that contain this rank; None for a group that would have only this rank.

    ``shard`` and ``replica`` are this rank's indices on the two axes, whose sizes are ``shards``
    and ``replicas``.
    """

    shard: int
    shards: int
    replica: int
    replicas: int
    gather: dist.ProcessGroup | None
    reduce: dist.ProcessGroup | None
    replicate: dist.ProcessGroup | None

    def close(self) -> None:
        """Destroy the process groups; all their ranks must call it.

        On gloo this also ends the waiting of peers, which raise, because a group without references
        closes its connections.
        """
        groups = [self.gather, self.reduce, self.replicate]
        self.gather = self.reduce = self.replicate = None
        while groups:
            if (group := groups.pop()) is not None:
                dist.destroy_process_group(group)


def make_meeting(
    device: torch.device, timeout: timedelta | None, give_up: Callable[[], None]
) -> Meeting:
    """Make the meeting of all ranks; collective. On gloo it has groups of its own: one whose
    collectives wait for their peers for ``timeout``, and, for what comes before a step, one with
    torch's default timeout, because a rank may do other work between steps."""
    if backend_of(device) != "gloo":
        return Meeting(device)
    group = dist.new_group(timeout=timeout, backend="gloo", group_desc="zeropp meetings")
    before = dist.new_group(backend="gloo", group_desc="zeropp agreements")
    return Meeting(device, group, give_up, before=before)


def make_groups(layout: Layout, device: torch.device, timeout: timedelta | None) -> DataGroups:
    """Make the groups of all shards and replicas, whatever their numbering; collective over all
    ranks, because torch names groups by how many a rank has made.

    ``timeout``: how long a collective waits for its peers; None: torch's default.
    """
    place = layout.coordinates(dist.get_rank())
    make = partial(_group, layout, backend=backend_of(device), timeout=timeout)
    return DataGroups(
        shard=place["shard"],
        shards=layout.shard,
        replica=place["replicate"],
        replicas=layout.replicate,
        gather=make("shard", name="zeropp gathers"),
        reduce=make("shard", name="zeropp reductions"),
        replicate=make("replicate", name="zeropp replicas"),
    )


def backend_of(device: torch.device) -> str:
    """The backend that the default process group uses for tensors on a device."""
    backends = dict(entry.split(":") for entry in dist.get_backend_config().split(","))
    return backends[device.type]


def _group(
    layout: Layout, axis: Axis, *, backend: str, name: str, timeout: timedelta | None
) -> dist.ProcessGroup | None:
    lots = list(_lots(layout, axis))
    if len(lots[0]) == 1:
        return None
    mine: dist.ProcessGroup | None = None
    mine, _ = dist.new_subgroups_by_enumeration(  # type: ignore[no-untyped-call]
        lots, timeout=timeout, backend=backend, group_desc=name
    )
    return mine


def _lots(layout: Layout, axis: Axis) -> Iterator[list[int]]:
    """Lists of ranks that differ only on one axis, one list per place on the other axes."""
    sizes = dict(layout.axes)
    lots: dict[tuple[int, ...], list[int]] = {}
    for rank in range(layout.world):
        place = layout.coordinates(rank)
        key = tuple(place[other] for other in sizes if other != axis)
        lots.setdefault(key, [0] * sizes[axis])[place[axis]] = rank
    yield from lots.values()
