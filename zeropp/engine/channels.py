"""Point-to-point messages between pipeline ranks: sends never block, receives are posted early.

In a process group of NCCL all that a rank sends and receives may share one stream (it does where
the job was initialised with a device). So in each group a rank exchanges messages with one other,
in one direction: a message that waits for its receiver holds up neither compute nor messages of
other pairs. Pairs that have no rank in common share a group, over all pipelines: two to six groups
of the whole job do, however many ranks there are. On one pair messages are matched by order; the
schedule's passes put receives in the order of the sends.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from zeropp.engine.groups import backend_of
from zeropp.layout import Layout

Pair = tuple[int, int]  # pipeline ranks: source, target


@dataclass
class _Pending:
    tensor: Tensor
    work: dist.Work


class Channels:
    """Messages of this rank's pipeline; construction is collective over all ranks.

    ``timeout``: how long a message waits for its peer; None: torch's default.
    """

    def __init__(
        self,
        pairs: Iterable[Pair],
        layout: Layout,
        device: torch.device,
        timeout: timedelta | None = None,
    ) -> None:
        self.device = device
        self._rank = layout.coordinates(dist.get_rank())["pp"]
        self._global_ranks = layout.pipeline(dist.get_rank())
        self._groups: dict[Pair, dist.ProcessGroup] = {}
        self._sends: list[_Pending] = []
        for apart in disjoint(pairs):
            group = dist.new_group(timeout=timeout, backend=backend_of(device))
            self._groups |= {pair: group for pair in apart if self._rank in pair}
        for source, target in self._groups:
            self._connect(source, target, device)

    def send(self, tensor: Tensor, target: int) -> None:
        """Start to send; the tensor is kept until ``drain``."""
        group = self._groups[self._rank, target]
        work = dist.isend(tensor, self._global_ranks[target], group=group)
        assert work is not None
        self._sends.append(_Pending(tensor, work))
        self._forget_finished()

    def receive(self, tensor: Tensor, source: int) -> dist.Work:
        """Post a receive into ``tensor``; wait on the result before reading it."""
        group = self._groups[source, self._rank]
        work = dist.irecv(tensor, self._global_ranks[source], group=group)
        assert work is not None
        return work

    def drain(self) -> None:
        """Wait until every message has left."""
        for pending in self._sends:
            pending.work.wait()
        self._sends.clear()

    def close(self) -> None:
        """Give the groups up; collective over their ranks."""
        for group in set(self._groups.values()):
            dist.destroy_process_group(group)
        self._groups.clear()

    def _forget_finished(self) -> None:
        """Free sent tensors, oldest first; on one pair messages finish in order."""
        while self._sends and self._sends[0].work.is_completed():
            self._sends.pop(0).work.wait()

    def _connect(self, source: int, target: int, device: torch.device) -> None:
        """One message through a pair: NCCL connects on first use, and that would block ranks that
        first use their pairs in different orders."""
        group = self._groups[source, target]
        probe = torch.zeros(1, device=device)
        if self._rank == source:
            dist.send(probe, self._global_ranks[target], group=group)
        else:
            dist.recv(probe, self._global_ranks[source], group=group)


def disjoint(pairs: Iterable[Pair]) -> list[list[Pair]]:
    """Pairs in as few lots as come of taking them in order, no rank twice in a lot."""
    lots: list[list[Pair]] = []
    for pair in sorted(pairs):
        free = (lot for lot in lots if not any(set(pair) & set(other) for other in lot))
        lot = next(free, None)
        if lot is None:
            lots.append(lot := [])
        lot.append(pair)
    return lots


def new_group_in_each_pipeline(
    layout: Layout, members: Iterable[int], timeout: timedelta | None = None
) -> dist.ProcessGroup | None:
    """A group of the given pipeline ranks in every pipeline; the one this rank is in, if any.

    Every rank makes every group: torch names groups by how many a rank has made, so ranks that
    make different ones would not find each other.
    """
    mine = None
    for pipeline in layout.pipelines():
        ranks = sorted(pipeline[member] for member in members)
        group = dist.new_group(ranks, timeout=timeout)
        if dist.get_rank() in ranks:
            mine = group
    return mine
