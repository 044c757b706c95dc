"""Reductions of flat gradients over shards or replicas, as work that a lane runs.

Each reads the gradients where they lie; with another number type on the wire it casts them into a
buffer first, and what comes is added in the gradients' own type.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from zeropp.engine.groups import reduce_scatter_single


@dataclass(frozen=True)
class ReduceScatter:
    """Reduce-scatter ``source`` into ``total``, or add to it what comes if ``first`` is False.

    ``sent`` is the source, or a buffer that it is cast into; ``place`` is this rank's stretch.
    """

    source: Tensor
    sent: Tensor
    place: slice
    total: Tensor
    first: bool
    group: dist.ProcessGroup | None

    def __call__(self) -> None:
        cast = self.sent is not self.source
        if cast:
            self.sent.copy_(self.source)
        mine = self.total if self.first and not cast else self.sent[self.place]
        reduce_scatter_single(mine, self.sent, group=self.group)
        if not self.first:
            self.total.add_(mine)
        elif cast:
            self.total.copy_(mine)


@dataclass(frozen=True)
class AllReduce:
    """All-reduce ``source`` in place, by way of ``sent`` if that is another buffer, and add it to
    ``total`` unless it is ``first`` (and so the total itself)."""

    source: Tensor
    sent: Tensor
    total: Tensor
    first: bool
    group: dist.ProcessGroup | None

    def __call__(self) -> None:
        if self.sent is not self.source:
            self.sent.copy_(self.source)
        dist.all_reduce(self.sent, group=self.group)
        if not self.first:
            self.total.add_(self.sent)
        elif self.sent is not self.source:
            self.total.copy_(self.sent)
