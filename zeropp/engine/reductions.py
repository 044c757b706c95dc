"""Reductions of flat gradients over shards or replicas, as work that a lane runs.

A reduction reads the gradients directly. If it sends another number type, it first casts them into
a buffer, and adds the result in the type of the gradients.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

import torch.distributed as dist
from torch import Tensor

from zeropp.engine.groups import reduce_scatter_single


@dataclass(frozen=True)
class ReduceScatter:
    """Reduce-scatter ``source`` into ``total`` if ``first``, otherwise add the result to ``total``.

    ``sent`` is the source, or a buffer of the wire type into which it is cast; ``place`` is this
    rank's part.
    """

    source: Tensor
    sent: Tensor
    place: slice
    _: KW_ONLY
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
    _: KW_ONLY
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
