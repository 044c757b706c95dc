"""Point-to-point messages between pipeline ranks: sends never block, receives are posted early.

Every ordered pair of neighbours has a process group of its own, so on CUDA a message that waits
for its receiver holds up neither compute nor messages of other pairs. On one pair messages are
matched by order; the schedule's passes put receives in the order of the sends.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

Pair = tuple[int, int]  # pipeline ranks: source, target


@dataclass
class _Pending:
    tensor: Tensor
    work: dist.Work


class Channels:
    """Messages of one pipeline; ``global_ranks[p]`` is the world rank of pipeline rank p."""

    def __init__(
        self, pairs: Iterable[Pair], global_ranks: Sequence[int], rank: int, device: torch.device
    ) -> None:
        self._rank = rank
        self._global_ranks = global_ranks
        self._groups: dict[Pair, dist.ProcessGroup] = {}
        self._sends: list[_Pending] = []
        for source, target in sorted(pairs):
            if rank in (source, target):
                self._groups[source, target] = self._open(source, target, device)

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

    def _forget_finished(self) -> None:
        """Free sent tensors, oldest first; on one pair messages finish in order."""
        while self._sends and self._sends[0].work.is_completed():
            self._sends.pop(0).work.wait()

    def _open(self, source: int, target: int, device: torch.device) -> dist.ProcessGroup:
        """A group of two, and one message through it: NCCL connects on first use, and that would
        block two ranks that first use their pairs in different orders."""
        members = [self._global_ranks[source], self._global_ranks[target]]
        group = dist.new_group(sorted(members), use_local_synchronization=True)
        probe = torch.zeros(1, device=device)
        if self._rank == source:
            dist.send(probe, self._global_ranks[target], group=group)
        else:
            dist.recv(probe, self._global_ranks[source], group=group)
        return group  # type: ignore[no-any-return]
