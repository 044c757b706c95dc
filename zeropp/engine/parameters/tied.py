"""Weights that two layers share: two copies, in flat buffers of their own, that stay equal."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from datetime import timedelta

import torch
import torch.distributed as dist

from zeropp.engine.parameters.flat import FlatParameters
from zeropp.engine.parameters.flat_layout import Name
from zeropp.engine.ranks.collectives import new_group_in_each_pipeline
from zeropp.schedule.plan import Plan


class TiedWeights:
    """Keeps two copies of a parameter equal that the model uses in two layers (tied embeddings);
    does nothing if both uses are in one chunk, where they are one.

    The copies, on two pipeline ranks or on one, begin equal, and their gradients are summed before
    every optimizer step, so they stay equal. Each is in a flat buffer of its own, and both buffers
    are divided in the same way, so that corresponding ranks have the same part. ``copy`` is the
    buffer of the second name, if this rank has it and it is not the buffer of the first: gradient
    norms and full parameters leave it out. All ranks must construct it, and ``undo`` destroys its
    process group.
    """

    def __init__(
        self,
        tied: tuple[Name, Name],
        plan: Plan,
        flats: Sequence[FlatParameters],
        timeout: timedelta | None,
        undo: ExitStack,
    ) -> None:
        ends = [
            next((f for f in flats if any(name in slot.names for slot in f.members)), None)
            for name in tied
        ]
        self.copy = ends[1] if ends[1] is not ends[0] else None
        self._flats = [flat for flat in dict.fromkeys(ends) if flat is not None]
        self._group: dist.ProcessGroup | None = None
        first, second = (plan.schedule.stage_rank[plan.stage_of(index)] for index, _ in tied)
        if first != second:
            self._group = new_group_in_each_pipeline(plan.layout, {first, second}, timeout)
        if self._group is not None:
            undo.callback(dist.destroy_process_group, self._group)
            undo.callback(vars(self).pop, "_group")  # else it would live on
        self._make_equal(plan.layout.pipeline(dist.get_rank())[first])

    def sum_gradients(self) -> None:
        """Replace the gradients of both copies by their sum."""
        gradients = [gradient for flat in self._flats if (gradient := flat.gradient()) is not None]
        if self._group is not None and gradients:
            dist.all_reduce(gradients[0], group=self._group)
        elif len(gradients) == 2:
            gradients[0].add_(gradients[1])
            gradients[1].copy_(gradients[0])

    @torch.no_grad()
    def _make_equal(self, source: int) -> None:
        """Overwrite the copy with the original's values, which the global rank ``source`` has."""
        if self._group is not None:
            dist.broadcast(self._flats[0].master, source, group=self._group)
        elif len(self._flats) == 2:
            self._flats[1].master.copy_(self._flats[0].master)
        for flat in self._flats:
            flat.gather_updated()
