"""Tied embeddings in a pipeline, which torch's pipelining does not provide.

The head's stage holds a copy of the embedding's weight. After every step's backward both get the
sum of their gradients, so that they stay equal.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from baselines.fsdp2 import local
from zeropp.engine.channels import new_group_in_each_pipeline
from zeropp.plan import Plan


class TiedEnds:
    """The tied weights that this rank holds: the embedding's, the head's, both or none. Both are
    sharded in the same way. All ranks of the world must construct it."""

    def __init__(self, plan: Plan, chunks: dict[int, nn.Module]) -> None:
        schedule, layout = plan.schedule, plan.layout
        last = schedule.num_stages - 1
        ends = {schedule.stage_rank[0], schedule.stage_rank[last]}
        group = new_group_in_each_pipeline(layout, ends) if len(ends) == 2 else None
        self._group = group
        self._weights: list[nn.Parameter] = []
        self.copy: nn.Parameter | None = None
        if 0 in chunks:
            self._weights.append(chunks[0].get_parameter("pieces.0.tokens.weight"))
        if last in chunks:
            head = plan.shape.num_pieces - 1
            self.copy = chunks[last].get_parameter(f"pieces.{head}.output.weight")
            self._weights.append(self.copy)
        source = layout.pipeline(dist.get_rank())[schedule.stage_rank[0]]
        with torch.no_grad():
            self._make_equal(source)

    def sum_gradients(self) -> None:
        """Replace the gradients of both weights by their sum. All ranks must call it."""
        gradients: list[Tensor] = [local(w.grad) for w in self._weights if w.grad is not None]
        if self._group is not None:
            dist.all_reduce(gradients[0], group=self._group)
        elif len(gradients) == 2:
            gradients[0].add_(gradients[1])
            gradients[1].copy_(gradients[0])

    def _make_equal(self, source: int) -> None:
        if self._group is not None:
            dist.broadcast(local(self._weights[0].data), source, group=self._group)
        elif len(self._weights) == 2:
            original, copy = self._weights
            local(copy.data).copy_(local(original.data))
