"""Process groups of a rank's shards and replicas, and the collectives that the engine runs there.

Gathers and reductions have groups of their own over the same ranks: each runs in a lane of its own
(``zeropp.engine.lanes``), and on one group the order of collectives must be the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from zeropp.layout import Layout
from zeropp.literals import Axis

# The names that torch 2.13 gives these collectives; before, the others are the only ones.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class DataGroups:
    """The groups that this rank is in; None where the group would be this rank alone.

    ``shard`` and ``replica`` are this rank's places on the two axes, ``shards`` and ``replicas``
    how many places there are.
    """

    shard: int
    shards: int
    replica: int
    replicas: int
    gather: dist.ProcessGroup | None
    reduce: dist.ProcessGroup | None
    replicate: dist.ProcessGroup | None

    def close(self) -> None:
        """Give the groups up; collective over their ranks."""
        for group in (self.gather, self.reduce, self.replicate):
            if group is not None:
                dist.destroy_process_group(group)


def make_groups(layout: Layout, device: torch.device, timeout: timedelta | None) -> DataGroups:
    """Make the groups of all shards and replicas, whatever their numbering; collective over all
    ranks, because torch names groups by how many a rank has made.

    ``timeout``: how long a collective waits for its peers; None: torch's default.
    """
    place = layout.coordinates(dist.get_rank())
    make = partial(_group, layout, backend=backend_of(device), timeout=timeout)
    return DataGroups(
        place["shard"],
        layout.shard,
        place["replicate"],
        layout.replicate,
        make("shard", name="zeropp gathers"),
        make("shard", name="zeropp reductions"),
        make("replicate", name="zeropp replicas"),
    )


def backend_of(device: torch.device) -> str:
    """The backend that the default group uses for a device's tensors."""
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
    """The ranks that differ on one axis alone, for every place on the other ones."""
    sizes = dict(layout.axes)
    lots: dict[tuple[int, ...], list[int]] = {}
    for rank in range(layout.world):
        place = layout.coordinates(rank)
        key = tuple(place[other] for other in sizes if other != axis)
        lots.setdefault(key, [0] * sizes[axis])[place[axis]] = rank
    yield from lots.values()
