"""Parameters that their optimizer needs whole, because it looks at their shapes or at all of their
elements at once (Muon, Shampoo, Adafactor): ranks share them out for the update.

A flat buffer is cut without regard to parameters. Those that are updated whole are its last ones,
rank by rank (``lay_out``). So an all-to-all makes of the ranges of all ranks, in the order of the
buffer, one span of whole parameters per rank, and after the update another one makes the ranges of
the spans: every element moves three times per step (gradient, value, and updated value), in the
type of the masters. Each rank then has its share of these parameters twice for a moment. Between
updates they are NaN and take no memory.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zeropp.engine.parameters.flat_layout import ElementRange, FlatLayout, OptimizerShard


class WholeParameters:
    """The parameters of one flat buffer that this rank updates whole.

    ``group`` has the ranks of the layout's spans, in their order. ``shards`` are the optimizer's
    tensors; ``gradient`` is that of all of them, from ``gather`` to ``give_back``.
    """

    def __init__(
        self,
        layout: FlatLayout,
        group: dist.ProcessGroup,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._group, self._span = group, layout.spans[layout.rank]
        everything = ElementRange(layout.spans[0].begin, layout.spans[-1].end)
        self._own = layout.owned.intersect(everything).inside(layout.owned)
        # This rank's elements of every span, and every rank's elements of this rank's span. Ranks
        # need not be in the order of the buffer.
        self._given = [len(layout.owned.intersect(span)) for span in layout.spans]
        held = [owned.intersect(self._span) for owned in layout.all_owned]
        self._taken = [len(part) for part in held]
        self._places = [part.inside(self._span) for part in held]
        self._in_order = sorted(range(len(held)), key=lambda rank: held[rank].begin)
        self._slots = layout.whole_slots()
        nothing = torch.full((len(self._slots),), torch.nan, dtype=dtype, device=device)
        self._hidden = [
            nan.expand(slot.shape) for slot, nan in zip(self._slots, nothing, strict=True)
        ]
        self.shards = [
            OptimizerShard(slot.group, slot.elements, nn.Parameter(hidden))
            for slot, hidden in zip(self._slots, self._hidden, strict=True)
        ]
        self.gradient: Tensor | None = None
        self._values: Tensor | None = None

    def gather(self, rows: Tensor, gradient: Tensor) -> None:
        """Make this rank's tensors whole. ``rows`` are the values that every rank keeps of what it
        is to update, and ``gradient`` is that of them."""
        self._values, self.gradient = map(self._gathered, (rows[self._own], gradient[self._own]))
        for slot, shard in zip(self._slots, self.shards, strict=True):
            place = slot.elements.inside(self._span)
            shard.tensor.data = self._values[place].view(slot.shape)
            shard.tensor.grad = self.gradient[place].view(slot.shape)

    def give_back(self, rows: Tensor) -> None:
        """Replace ``rows`` by what the ranks have made of them since ``gather``, if they have."""
        if self._values is None:
            return
        sent = torch.cat([self._values[place] for place in self._places])
        dist.all_to_all_single(rows[self._own], sent, self._given, self._taken, group=self._group)
        self._values = self.gradient = None
        for shard, hidden in zip(self.shards, self._hidden, strict=True):
            shard.tensor.data, shard.tensor.grad = hidden, None

    def _gathered(self, part: Tensor) -> Tensor:
        """This rank's span, from all ranks' parts of it; ``part``: what it has of all spans."""
        taken = part.new_empty(len(self._span))
        dist.all_to_all_single(taken, part, self._taken, self._given, group=self._group)
        pieces = torch.split(taken, self._taken)
        return torch.cat([pieces[rank] for rank in self._in_order])
