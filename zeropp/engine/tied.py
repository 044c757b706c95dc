"""Two parameters of the pipeline's ends that are one in the model (tied embeddings).

Each end keeps its own sharded copy; they begin equal, their gradients are summed before the
optimizer's step, and so they stay equal. Both are cut alike, so a rank's part meets its like.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn

from zeropp.engine.channels import new_group_in_each_pipeline
from zeropp.engine.replicas import Name
from zeropp.layout import Layout
from zeropp.schedule.program import Schedule


class TiedWeights:
    """Keeps (original, copy) equal; does nothing where ``tied`` is None.

    ``parameters`` are those that this rank updates. ``copy`` is the second name: norms and whole
    parameters skip it.
    """

    def __init__(
        self,
        tied: tuple[Name, Name] | None,
        parameters: Mapping[Name, nn.Parameter],
        schedule: Schedule,
        layout: Layout,
    ) -> None:
        self.copy: Name | None = tied[1] if tied is not None else None
        self._mine = [parameters[name] for name in tied or () if name in parameters]
        self._group: dist.ProcessGroup | None = None
        if tied is None:
            return
        ends = {schedule.stage_rank[0], schedule.stage_rank[-1]}
        if len(ends) == 2:
            self._group = new_group_in_each_pipeline(layout, ends)
        self._source = layout.pipeline(dist.get_rank())[schedule.stage_rank[0]]
        self._make_equal()

    def sum_gradients(self) -> None:
        """Give both the sum of their gradients."""
        gradients = [p.grad for p in self._mine if p.grad is not None]
        if self._group is not None:
            dist.all_reduce(gradients[0], group=self._group)
        elif len(gradients) == 2:
            gradients[0].add_(gradients[1])
            gradients[1].copy_(gradients[0])

    @torch.no_grad()
    def _make_equal(self) -> None:
        """Give the copy the original's values."""
        if self._group is not None:
            dist.broadcast(self._mine[0], self._source, group=self._group)
        elif len(self._mine) == 2:
            original, copy = self._mine
            copy.copy_(original)
