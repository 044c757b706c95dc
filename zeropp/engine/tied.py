"""A parameter that the model uses in its first and last layer (tied embeddings), on two ranks.

Each of the two pipeline ranks keeps a sharded copy. The copies begin equal, and their gradients are
summed before every optimizer step, so they stay equal. Each is in a flat buffer of its own, and
both buffers are cut in the same way, so that corresponding ranks have the same part. If both uses
are in one chunk, they are one parameter and nothing of this is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from zeropp.engine.channels import new_group_in_each_pipeline
from zeropp.engine.flat import FlatParameters
from zeropp.engine.flat_layout import Name
from zeropp.engine.sharding import ChunkShards
from zeropp.layout import Layout
from zeropp.schedule.program import Schedule


class TiedWeights:
    """Keeps the two copies equal; does nothing if ``tied`` is None.

    ``copy`` is the buffer of the second name, if this rank has it and it is not the buffer of the
    first: gradient norms and full parameters leave it out.
    """

    def __init__(
        self,
        tied: tuple[Name, Name] | None,
        chunks: Sequence[ChunkShards],
        *,
        schedule: Schedule,
        layout: Layout,
        timeout: timedelta | None = None,
    ) -> None:
        original, copy = (_find(name, chunks) for name in tied or (None, None))
        self.copy = copy if copy is not original else None
        self._mine = [flat for flat in (original, self.copy) if flat is not None]
        self._group: dist.ProcessGroup | None = None
        if tied is None:
            return
        ends = {schedule.stage_rank[0], schedule.stage_rank[-1]}
        if len(ends) == 2:
            self._group = new_group_in_each_pipeline(layout, ends, timeout)
        self._source = layout.pipeline(dist.get_rank())[schedule.stage_rank[0]]
        self._make_equal()

    def sum_gradients(self) -> None:
        """Replace the gradients of both copies by their sum."""
        gradients = [flat.gradient() for flat in self._mine]
        found = [gradient for gradient in gradients if gradient is not None]
        if self._group is not None and found:
            dist.all_reduce(found[0], group=self._group)
        elif len(found) == 2:
            found[0].add_(found[1])
            found[1].copy_(found[0])

    def close(self) -> None:
        """Destroy the process group; all its ranks must call it."""
        group, self._group = self._group, None
        if group is not None:
            dist.destroy_process_group(group)

    @torch.no_grad()
    def _make_equal(self) -> None:
        """Overwrite the copy with the original's values."""
        if self._group is not None:
            dist.broadcast(self._mine[0].master, self._source, group=self._group)
        elif len(self._mine) == 2:
            original, copy = self._mine
            copy.master.copy_(original.master)
        for flat in self._mine:
            flat.gather_updated()


def _find(name: Name | None, chunks: Sequence[ChunkShards]) -> FlatParameters | None:
    if name is None:
        return None
    return next((flat for chunk in chunks if (flat := chunk.flat_of(name)) is not None), None)
