"""Parameters of a chunk in one flat buffer: gathered, summed, reduced and updated as one tensor.

Every shard rank keeps an equal part of the fp32 master parameters. A gather writes into the buffer
of which the modules' parameters are views. Gradients are summed in a buffer of which the
parameters' ``.grad`` are views, and the reduction reads this buffer. So compute and collectives use
the same memory, and nothing is copied around a collective. Collectives and casts run in lanes
(``zeropp.engine.lanes``); compute waits for a collective before it uses the result.

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

from collections.abc import Iterator, Sequence
from itertools import chain

import torch
from torch import Tensor, nn

from zeropp.engine.flat_layout import FlatLayout, Name, Slot
from zeropp.engine.groups import DataGroups, all_gather_single
from zeropp.engine.held import Held, Types, Views, check_kept, taken, view
from zeropp.engine.lanes import Ticket, Work
from zeropp.engine.owned import Owned
from zeropp.engine.rank_lanes import Lanes
from zeropp.engine.reductions import AllReduce, ReduceScatter
from zeropp.engine.sums import Sums


class FlatParameters:
    """One flat buffer. ``trainable``: whether its parameters have gradients and an optimizer;
    ``deferred``: whether its gradients come with delayed weight gradients; ``keeps_sums``: whether
    the memory of gradient sums is used again in the next step.

    The constructor copies the parameters' values. Inside steps, parameters are views of the buffer,
    which has memory only between ``unshard`` and ``reshard``; outside of steps they are NaN
    (``Views``). If nothing has to be gathered or cast for compute, the buffer is what this rank
    keeps anyway, so it always has memory, and parameters are always views of it.
    """

    def __init__(
        self,
        held: Sequence[Held],
        layout: FlatLayout,
        *,
        groups: DataGroups,
        lanes: Lanes,
        types: Types,
        zero: bool,
        trainable: bool,
        deferred: bool,
        keeps_sums: bool,
    ) -> None:
        self.layout, self.trainable, self.deferred = layout, trainable, deferred
        self.held, self._groups, self._lanes, self._types = tuple(held), groups, lanes, types
        self._zero = zero and groups.replicate is not None
        mixed = types.compute != types.master
        self._kept = layout.owned if mixed and self._zero else layout.part
        self.master = taken(held, self._kept, types.master)
        # This rank's part as gathers send it; None: they cast the masters every time.
        self._part: Tensor | None = None if mixed else self.master
        if mixed and self._zero:
            self._part = taken(held, layout.part, types.compute)
        self._resident = groups.gather is None and self._part is not None
        self._buffer = self._make_buffer()
        self._arriving: Ticket | None = None  # a gather that compute has not waited for
        self.updated: Ticket | None = None  # the other replicas' rows after an update
        self._sums = Sums(layout.size, types.master, self.master.device, keeps=keeps_sums)
        self._given: list[Tensor] = []  # the views of the sums that parameters have as gradients
        self._fresh: Tensor | None = None  # sums of this rank that are not reduced
        self._partial: Tensor | None = None  # reduced over the shards, not over the replicas
        self._crossed: Tensor | None = None  # reduced over both
        self.owned = [
            Owned(group, mine, nn.Parameter(self.master[mine.inside(self._kept)]))
            for group, mine in (layout.groups() if trainable else ())
        ]

    @property
    def rows(self) -> Tensor:
        """The masters of what this rank updates."""
        return self.master[self.layout.owned.inside(self._kept)]

    def unshard(self) -> None:
        """Start to gather the parameters; ``wait`` before use."""
        if self._resident:
            return
        self._storage.resize_(self.layout.size * self._buffer.element_size())
        after = [self.updated] if self.updated is not None else []
        self._arriving = self._lanes.gather.run(self._gather, after)

    def wait(self) -> None:
        """Make compute wait for the gather that ``unshard`` has started."""
        if self._resident and self.updated is not None:
            self.updated.wait()
            self.updated = None
        if self._arriving is not None:
            self._arriving.wait()
            self._arriving = self.updated = None

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
        if self._fresh is not None or not self.trainable:
            return
        self._lanes.join_reduction_of(self)
        self._given.clear()
        self._fresh = self._sums.make()
        for held in self.held:
            gradient = view(self._fresh, held.slot)
            self._given.append(gradient)
            for parameter in held.parameters:
                made, parameter.grad = parameter.grad, gradient
                if made is not None:
                    gradient.add_(made)

    def reduce(self, *, cross: bool) -> None:
        """Start to sum the gradients over the shards, and then over the replicas if ``cross``."""
        if not self.trainable:
            return
        self.make_gradients()  # zeros where this rank has none, because others may have some
        check_kept(self.held, self._given)
        cross = cross and self._groups.replicate is not None
        after: list[Ticket] = []
        if self._groups.reduce is not None:
            self._lanes.reducing[self] = self._reduce_shards(self._take_fresh())
            after = [self._lanes.reducing[self]]
        elif cross:
            self._partial = self._take_fresh()
        if cross:
            self._lanes.crossing.append(self._cross_replicas(after))

    def finish(self) -> None:
        """Set the gradients of the tensors that the optimizer updates: sums over all data-parallel
        ranks. Compute must have waited for all reductions."""
        if (gradient := self.gradient()) is None:
            return
        for one in self.owned:
            one.tensor.grad = gradient[one.stretch.inside(self.layout.owned)]

    def gradient(self) -> Tensor | None:
        """The gradient of what this rank updates, after ``finish``; None without one."""
        if self._groups.replicate is not None:
            return self._crossed
        return self._partial if self._groups.reduce is not None else self._fresh

    def clear_gradients(self) -> None:
        """Drop all gradients."""
        self._sums.give_back(self._fresh)
        self._fresh = None
        for parameter in self._parameters:
            parameter.grad = None
        self._partial = self._crossed = None
        for one in self.owned:
            one.tensor.grad = None

    def gather_updated(self) -> None:
        """Start to gather the rows that other replicas have updated; the next gather or the next
        use waits for them."""
        if self._zero:
            self.updated = self._lanes.replicate.run(self._gather_rows)

    def whole(self, mine: Tensor) -> Tensor:
        """The whole of a tensor of which ``mine`` is this rank's part, shaped as the rows that it
        updates; collective. All buffers must be settled: the lanes use the same process groups."""
        for group in (self._groups.replicate if self._zero else None, self._groups.gather):
            if group is not None:
                gathered = mine.new_empty(mine.numel() * group.size())
                all_gather_single(gathered, mine, group=group)
                mine = gathered
        return mine

    def copies(self, mine: Tensor, dtype: torch.dtype) -> list[tuple[Slot, Tensor]]:
        """Every parameter's part of ``whole(mine)``, copied to the CPU; collective."""
        whole = self.whole(mine)
        return [(one.slot, view(whole, one.slot).to(dtype, copy=True).cpu()) for one in self.held]

    def names(self) -> Iterator[Name]:
        """All names of all parameters."""
        for held in self.held:
            yield from held.slot.names

    def is_in_buffer(self, x: Tensor) -> bool:
        """Whether a tensor lies in the memory of gathered parameters."""
        return x.untyped_storage() is self._storage

    def gathered_bytes(self) -> int:
        """Bytes of gathered parameters, with those that are being gathered."""
        return 0 if self._resident else self._storage.nbytes()

    def unreduced_bytes(self) -> int:
        """Bytes of gradients whose reduction over the shards has not begun."""
        return 0 if self._fresh is None else self._fresh.nbytes

    @property
    def _parameters(self) -> Iterator[nn.Parameter]:
        return chain.from_iterable(held.parameters for held in self.held)

    @property
    def _storage(self) -> torch.UntypedStorage:
        return self._buffer.untyped_storage()

    def _make_buffer(self) -> Tensor:
        """Make the buffer for compute, and make the parameters views of it."""
        for parameter in self._parameters:
            parameter.data = parameter.data.new_empty(0)
        if self._resident:
            assert self._part is not None
            buffer = self._part
        else:
            buffer = self.master.new_empty(self.layout.size, dtype=self._types.compute)
        self.views = Views(
            self.held, buffer, hides=not self._resident, is_master=buffer is self.master
        )
        if self.trainable:
            for parameter in self._parameters:
                parameter.grad_dtype = None
        if not self._resident:
            buffer.untyped_storage().resize_(0)
        return buffer

    def _gather(self) -> None:
        mine = self._part
        if mine is None:
            mine = self._buffer[self.layout.part.begin : self.layout.part.end]
            mine.copy_(self.master)
        if self._groups.gather is not None:
            all_gather_single(self._buffer, mine, group=self._groups.gather)

    def _take_fresh(self) -> Tensor:
        """The sums so far; parameters have no gradients until they are given new ones."""
        fresh, self._fresh = self._fresh, None
        self._given.clear()
        for parameter in self._parameters:
            parameter.grad = None
        assert fresh is not None
        return fresh

    def _reduce_shards(self, fresh: Tensor) -> Ticket:
        first = self._partial is None
        if self._partial is None:
            self._partial = fresh.new_empty(len(self.layout.part))
        place, group = slice(self.layout.part.begin, self.layout.part.end), self._groups.reduce
        work = ReduceScatter(
            fresh, self._sent(fresh), place, total=self._partial, first=first, group=group
        )
        return self._lanes.reduce.run(work)

    def _cross_replicas(self, after: Sequence[Ticket]) -> Ticket:
        partial, self._partial = self._partial, None
        assert partial is not None
        first, sent, group = self._crossed is None, self._sent(partial), self._groups.replicate
        work: Work
        if self._zero:
            place = self.layout.owned.inside(self.layout.part)
            if self._crossed is None:
                self._crossed = partial.new_empty(len(self.layout.owned))
            work = ReduceScatter(
                partial, sent, place, total=self._crossed, first=first, group=group
            )
        else:
            if self._crossed is None:
                self._crossed = partial
            work = AllReduce(partial, sent, self._crossed, first=first, group=group)
        return self._lanes.replicate.run(work, after)

    def _sent(self, gradient: Tensor) -> Tensor:
        """What a reduction reads: the gradient itself, or a place for it in another type."""
        if self._types.wire == gradient.dtype:
            return gradient
        return torch.empty_like(gradient, dtype=self._types.wire)

    def _gather_rows(self) -> None:
        assert self._part is not None
        rows = self._part[self.layout.owned.inside(self.layout.part)]
        if self._part is not self.master:
            rows.copy_(self.master)
        all_gather_single(self._part, rows, group=self._groups.replicate)
