"""Parameters of a chunk in one flat buffer: gathered, summed, reduced and updated as one tensor.

Every shard rank keeps an equal part of the fp32 master parameters. A gather writes into a
buffer, and the modules' parameters are views of it. Gradients are summed in another buffer: the
parameters' ``.grad`` are views of it, and the reduction reads it. So compute and collectives use
the same memory, and nothing is copied around a collective. Collectives and casts run in lanes
(``zeropp.engine.ranks.lanes``); compute waits for a collective before it uses the result.

There are three number types. Masters and gradient sums are fp32 (or wider, if the parameters are).
Compute uses ``compute`` (bf16 under mixed precision), and reductions send ``wire``. If replicas
split the optimizer's work (ZeRO-1) and compute is narrower than the masters, a rank keeps fp32
masters only of the rows that it updates, and its whole part in the type of compute. Replicas then
send each other updated rows in that type, which halves the bytes.

This rests on three properties of torch. ``parameter.data = view`` shares the memory but not the
version counter, so autograd does not see a collective's write as an in-place change. A bf16
parameter accepts an fp32 gradient after ``parameter.grad_dtype = None``. ``resize_(0)`` frees a
storage, and ``resize_(bytes)`` allocates it again, at another address.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zeropp.engine.parameters.flat_layout import ElementRange, FlatLayout, OptimizerShard, Slot
from zeropp.engine.ranks.collectives import (
    DataGroups,
    all_gather_single,
    backend_of,
    reduce_scatter_single,
)
from zeropp.engine.ranks.lanes import Lanes, Ticket

if TYPE_CHECKING:
    from zeropp.engine.parameters.parts import GradientRoom
    from zeropp.engine.parameters.whole import WholeParameters


@dataclass(frozen=True)
class Types:
    """The number types of one flat buffer; ``wire`` is the type that reductions send."""

    master: torch.dtype
    compute: torch.dtype
    wire: torch.dtype


def zeros(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A buffer for gradients (a function of its own, so that traces can recognise the buffer)."""
    return torch.zeros(size, dtype=dtype, device=device)


class FlatParameters:
    """One flat buffer. ``members``: the parameter in each slot, or several that the model ties;
    ``trainable``: whether its parameters have gradients and an optimizer;
    ``deferred``: whether its gradients come with delayed weight gradients.

    ``unshard``, ``wait`` and ``reshard`` come in this order, as ``zeropp.schedule.legality`` has
    found of the program. A buffer that is this rank's part, as one rank has all of it, is unsharded
    for good, and these methods do nothing to it.

    The constructor copies the parameters' values. Inside steps, parameters are views of the buffer,
    which has memory only between ``unshard`` and ``reshard``; outside of steps they are NaN, unless
    the buffer is what this rank keeps and updates anyway. (Views of a buffer without memory would
    end the process of whoever reads them.)
    """

    def __init__(
        self,
        members: Mapping[Slot, Sequence[nn.Parameter]],
        layout: FlatLayout,
        *,
        groups: DataGroups,
        lanes: Lanes,
        types: Types,
        zero: bool,
        trainable: bool,
        deferred: bool,
    ) -> None:
        self.layout, self.trainable, self.deferred = layout, trainable, deferred
        self.members, self._groups, self._lanes, self._types = members, groups, lanes, types
        self._zero = zero and groups.replicate is not None
        mixed = types.compute != types.master
        self._kept = layout.owned if mixed and self._zero else layout.part
        self.master = self._values(self._kept, types.master)
        part = self._values(layout.part, types.compute) if mixed and self._zero else self.master
        self._casts = mixed and not self._zero  # every gather casts the masters to compute
        self._resident = groups.gather is None and not self._casts
        for parameter in self.parameters:  # their memory is free before the buffer takes some
            parameter.data = parameter.data.new_empty(0)
        self._buffer = part
        if not self._resident:
            self._buffer = self.master.new_empty(layout.size, dtype=types.compute)
        # This rank's part as gathers send it: what it keeps, or the place to which they cast it.
        self._part = self._buffer[layout.part.begin : layout.part.end] if self._casts else part
        self._make_views()
        if not self._resident:
            self._storage.resize_(0)
        self._gather_begun: Ticket | None = None  # that compute has not waited for
        # Gathers of rows that other replicas have updated; compute has not waited for them.
        self._row_gathers: list[Ticket] = []
        self._sums: Tensor | None = None  # gradients of this rank that are not reduced
        self._reduced: Tensor | None = None  # over the shards, at last over the replicas, too
        # What the optimizer updates here in the masters, and whole parameters that come for it.
        self.flat_shards = [
            OptimizerShard(group, elements, nn.Parameter(self.master[elements.inside(self._kept)]))
            for group, elements in (layout.groups() if trainable else ())
        ]
        self._in_place = [*self.flat_shards]
        self._version = self.master._version
        self.whole: WholeParameters | None = None
        self.room: GradientRoom | None = None  # for the gradients, if it is a part of a chunk
        if len(layout.spans) == 1:
            self._in_place += [
                OptimizerShard(slot.group, slot.elements, nn.Parameter(slot.view(self.master)))
                for slot in layout.whole_slots()
            ]
        elif layout.spans:
            assert groups.owners is not None
            from zeropp.engine.parameters.whole import WholeParameters

            self.whole = WholeParameters(layout, groups.owners, types.master, self.master.device)

    @property
    def owned(self) -> list[OptimizerShard]:
        """The tensors that this rank's optimizer updates."""
        return [*self._in_place, *(self.whole.shards if self.whole else ())]

    @property
    def has_sums(self) -> bool:
        """Whether gradients take memory that are not being reduced."""
        return self._sums is not None

    @property
    def gradient_bytes(self) -> int:
        """The bytes of all gradients before they are reduced."""
        return self.layout.size * self._types.master.itemsize

    @property
    def rows(self) -> Tensor:
        """The masters of what this rank updates."""
        return self.master[self.layout.owned.inside(self._kept)]

    def show(self) -> None:
        """Make the parameters views of the buffer, as they are inside steps."""
        for parameter, inside, _ in self._views:
            parameter.data = inside

    def hide(self) -> None:
        """Make the parameters NaN in their own shapes, as they are outside of steps, unless the
        buffer has the values that this rank updates."""
        for parameter, _, outside in self._views:
            parameter.data = outside

    def give_back(self) -> None:
        """Leave the parameters their trained values for good, if this rank has all of them in the
        masters' type."""
        if self._resident and self._buffer is self.master:
            self.settle()
            self.show()

    def unshard(self) -> None:
        """Start to gather the parameters after the compute so far; ``wait`` before use."""
        if self._resident:
            return
        self._storage.resize_(self.layout.size * self._buffer.element_size())
        self._gather_begun = self._lanes.gather.run(self._gather, tuple(self._row_gathers))

    def wait(self) -> None:
        """Make compute wait for the gather that ``unshard`` has started."""
        if self._resident:
            self.settle()
        elif self._gather_begun is not None:
            self._gather_begun.wait()
            self._row_gathers.clear()  # the gather has waited for them
            self._gather_begun = None

    def settle(self) -> None:
        """Let compute wait until the masters are those of the last update."""
        while self._row_gathers:
            self._row_gathers.pop().wait()

    def reshard(self) -> None:
        """Free the gathered parameters; gradients stay."""
        if not self._resident:
            self.wait()
            self._storage.resize_(0)

    def make_gradients(self) -> None:
        """Give every parameter a gradient of zeros to add to, unless it has one already.

        Compute first waits for the reduction of earlier sums, so that there are never two buffers.
        A gradient that autograd has made (of a weight whose gradient is delayed, but which is also
        used outside of its linear layer) is added.
        """
        if self._sums is not None or not self.trainable:
            return
        self._lanes.join_reduction_of(self)
        if self.room is not None:
            self.room.make(self)
        self._sums = zeros(self.layout.size, self._types.master, self.master.device)
        for slot, parameters in self.members.items():
            gradient = slot.view(self._sums)
            for parameter in parameters:
                made, parameter.grad = parameter.grad, gradient
                if made is not None:
                    gradient.add_(made)

    def reduce(self) -> None:
        """Start to sum the gradients over the shards."""
        if not self.trainable:
            return
        self.make_gradients()  # zeros where this rank has none, because others may have some
        if (group := self._groups.reduce) is None:
            return
        sums, part, is_first = self._take_sums(), self.layout.part, self._reduced is None
        if self._reduced is None:
            self._reduced = sums.new_empty(len(part))
        total, place = self._reduced, slice(part.begin, part.end)
        self._lanes.shard_reductions[self] = self._lanes.reduce.run(
            partial(_reduce_scatter, sums, self._sent(sums), place, total, is_first, group)
        )

    def reduce_over_replicas(self) -> None:
        """Start to sum the gradients over the replicas, once those of a step are reduced over the
        shards."""
        if not self.trainable:
            return
        reduction = self._lanes.shard_reductions.get(self)  # None: compute has waited for it
        if self._groups.reduce is None:
            self._reduced = self._take_sums()
        after = [] if reduction is None else [reduction]
        self._lanes.replica_reductions.append(self._reduce_over_replicas(after))

    def finish(self) -> None:
        """Set the gradients of the tensors that the optimizer updates: sums over all data-parallel
        ranks. Compute must have waited for all reductions."""
        if (gradient := self.gradient()) is not None:
            for shard in self._in_place:
                part = gradient[shard.elements.inside(self.layout.owned)]
                shard.tensor.grad = part.view_as(shard.tensor)

    def scale_gradients(self, factor: Tensor) -> None:
        """Multiply what ``finish`` has set, and all other gradients of what this rank updates."""
        for gradient in (self.gradient(), self.whole.gradient if self.whole else None):
            if gradient is not None:
                gradient.mul_(factor)

    def gather_whole(self) -> None:
        """Bring the parameters that this rank updates whole, with their gradients, here."""
        if self.whole is not None and (gradient := self.gradient()) is not None:
            self.whole.gather(self.rows, gradient)

    def gradient(self) -> Tensor | None:
        """The gradient of what this rank updates, after ``finish``; None without one."""
        is_alone = self._groups.reduce is None and self._groups.replicate is None
        return self._sums if is_alone else self._reduced

    def clear_gradients(self) -> None:
        """Drop all gradients."""
        self._sums = self._reduced = None
        for parameter in self.parameters:
            parameter.grad = None
        for shard in self.owned:
            shard.tensor.grad = None

    def gather_updated(self) -> None:
        """Take back what other ranks have updated whole, and start to gather the rows that other
        replicas have updated; the next gather or the next use waits for them."""
        if self.whole is not None:
            self.whole.give_back(self.rows)
        self._version = self.master._version
        if self._zero:
            self._row_gathers.append(self._lanes.replicate.run(self._gather_rows))

    @property
    def is_stale(self) -> bool:
        """Whether rows have changed in place since other replicas have gathered them, as
        schedule-free optimizers change them between steps. (Torch does not see it of ``.data``.)"""
        return self._zero and self.master._version != self._version

    def copies(self, part: Tensor, dtype: torch.dtype) -> list[tuple[Slot, Tensor]]:
        """Every parameter's part of a whole tensor, copied to the CPU; ``part`` is this rank's part
        of it, shaped as the rows that this rank updates. Collective; the buffer must be settled,
        because the lanes use the same process groups."""
        for group in (self._groups.replicate if self._zero else None, self._groups.gather):
            if group is not None:
                gathered = part.new_empty(part.numel() * group.size())
                all_gather_single(gathered, part, group=group)
                part = gathered
        return [(slot, slot.view(part).to(dtype, copy=True).cpu()) for slot in self.members]

    def is_in_buffer(self, x: Tensor) -> bool:
        """Whether a tensor lies in the memory of gathered parameters."""
        return x.untyped_storage() is self._storage

    @property
    def parameters(self) -> Iterator[nn.Parameter]:
        """All parameters, also those that are tied."""
        return chain.from_iterable(self.members.values())

    @property
    def _storage(self) -> torch.UntypedStorage:
        return self._buffer.untyped_storage()

    def _values(self, elements: ElementRange, dtype: torch.dtype) -> Tensor:
        """A range of the buffer with the parameters' values, and zeros between them."""
        (device,) = {parameter.device for parameter in self.parameters}
        buffer = torch.zeros(len(elements), dtype=dtype, device=device)
        for slot, parameters in self.members.items():
            common = slot.elements.intersect(elements)
            if len(common):
                values = parameters[0].detach().flatten()
                buffer[common.inside(elements)] = values[common.inside(slot.elements)]
        return buffer

    def _make_views(self) -> None:
        """Make what parameters are inside steps (views of the buffer) and outside of them."""
        slots = [(slot, one) for slot, parameters in self.members.items() for one in parameters]
        nothing = self._buffer.new_full((len(slots),), torch.nan)  # parameters share no memory
        self._views = [
            (parameter, slot.view(self._buffer), nan.expand(slot.shape))
            for (slot, parameter), nan in zip(slots, nothing, strict=True)
        ]
        self.show()
        if self.trainable:
            for parameter in self.parameters:
                parameter.grad_dtype = None
        if self._buffer is self.master and not self._zero:
            self._views = []  # parameters stay views of what this rank keeps and updates
        self.hide()

    def _gather(self) -> None:
        if self._casts:
            self._part.copy_(self.master)
        if self._groups.gather is not None:
            all_gather_single(self._buffer, self._part, group=self._groups.gather)

    def _take_sums(self) -> Tensor:
        """The sums so far; parameters have no gradients until they are given new ones."""
        sums, self._sums = self._sums, None
        for parameter in self.parameters:
            parameter.grad = None
        assert sums is not None
        return sums

    def _reduce_over_replicas(self, after: Sequence[Ticket]) -> Ticket:
        source, group = self._reduced, self._groups.replicate
        assert source is not None
        assert group is not None
        sent = self._sent(source)
        work = partial(_all_reduce, source, sent, group)
        if self._zero:
            self._reduced = total = source.new_empty(len(self.layout.owned))
            place = self.layout.owned.inside(self.layout.part)
            work = partial(_reduce_scatter, source, sent, place, total, True, group)
        return self._lanes.replicate.run(work, after)

    def _sent(self, gradient: Tensor) -> Tensor:
        """What a reduction reads: the gradient itself, or a place for it in another type."""
        if self._types.wire == gradient.dtype:
            return gradient
        return torch.empty_like(gradient, dtype=self._types.wire)

    def _gather_rows(self) -> None:
        part, own = self._part.data, self.layout.owned.inside(self.layout.part)
        rows = part[own]  # of ``data``, whose version is its own
        if self._part is not self.master:
            rows.copy_(self.master)
        # A loop may change its rows meanwhile. NCCL leaves them in place, gloo writes them again.
        gathered = torch.empty_like(part) if backend_of(part.device) == "gloo" else part
        all_gather_single(gathered, rows, group=self._groups.replicate)
        if gathered is not part:
            part[: own.start].copy_(gathered[: own.start])
            part[own.stop :].copy_(gathered[own.stop :])


def _reduce_scatter(
    source: Tensor, sent: Tensor, place: slice, total: Tensor, first: bool, group: dist.ProcessGroup
) -> None:
    """Reduce-scatter ``source``, cast into ``sent``, into ``total``, or add it to that."""
    cast = sent is not source
    if cast:
        sent.copy_(source)
    received = total if first and not cast else sent[place]
    reduce_scatter_single(received, sent, group=group)
    if not first:
        total.add_(received)
    elif cast:
        total.copy_(received)


def _all_reduce(source: Tensor, sent: Tensor, group: dist.ProcessGroup) -> None:
    """All-reduce ``source`` in place; ``sent`` as in ``_reduce_scatter``."""
    if sent is not source:
        sent.copy_(source)
    dist.all_reduce(sent, group=group)
    if sent is not source:
        source.copy_(sent)
