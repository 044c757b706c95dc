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

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zeropp.engine.collectives import DataGroups, all_gather_single, reduce_scatter_single
from zeropp.engine.flat_layout import FlatLayout, Name, Owned, Slot, Stretch
from zeropp.engine.lanes import Lanes, Ticket, Work

# The parameters of a flat buffer, and how their values are copied into it and viewed in it.


@dataclass(frozen=True)
class Types:
    """The number types of one flat buffer; ``wire`` is the type that reductions send."""

    master: torch.dtype
    compute: torch.dtype
    wire: torch.dtype


@dataclass(frozen=True)
class Held:
    """The parameters in one slot: one object, or several that the model ties."""

    slot: Slot
    parameters: tuple[nn.Parameter, ...]


def taken(held: Iterable[Held], stretch: Stretch, dtype: torch.dtype) -> Tensor:
    """A stretch of a buffer with the current values of the parameters, and zeros between them."""
    lot = list(held)
    (device,) = {parameter.device for one in lot for parameter in one.parameters}
    buffer = torch.zeros(len(stretch), dtype=dtype, device=device)
    for one in lot:
        mine = one.slot.stretch.meet(stretch)
        if len(mine):
            values = one.parameters[0].detach().flatten()
            buffer[mine.inside(stretch)] = values[mine.inside(one.slot.stretch)]
    return buffer


def view(buffer: Tensor, slot: Slot) -> Tensor:
    """The view, in a tensor of the buffer's size, of one parameter in its own shape."""
    return buffer[slot.stretch.begin : slot.stretch.end].view(slot.shape)


class _Noted(torch.autograd.Function):
    """Keeps tensors as if for a backward: reading them later raises RuntimeError if one of them was
    written to since, which is the public way to compare versions of tensors."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.clone()


def _noted(parameters: Iterable[Tensor]) -> Any:
    """A tensor whose ``grad_fn.saved_tensors`` raise once one of the parameters was written to.
    Torch 2.11 frees what was saved together with this tensor."""
    with torch.enable_grad():
        anchor = torch.empty(0, requires_grad=True)
        return _Noted.apply(anchor, *(parameter.detach() for parameter in parameters))  # type: ignore[no-untyped-call]


def _is_written(noted: Any) -> bool:
    try:
        noted.grad_fn.saved_tensors  # noqa: B018 - reading it compares the versions
    except RuntimeError:
        return True
    return False


class Views:
    """Parameters that are views of a buffer, and, if it ``hides`` them, NaN outside of steps.

    Outside of steps such a buffer has no memory, and whoever read a view of it would end the
    process. Each parameter has a NaN of its own, so that a write to one does not show in another.
    ``is_master``: whether the buffer has the values that the optimizer updates, not a copy of them.
    """

    def __init__(
        self, held: Iterable[Held], buffer: Tensor, *, hides: bool, is_master: bool
    ) -> None:
        slots = [(one.slot, parameter) for one in held for parameter in one.parameters]
        self.hides, self._is_master = hides, is_master
        self._nothing = buffer.new_full((len(slots) if hides else 0,), torch.nan)
        insides = [view(buffer, slot) for slot, _ in slots]
        outsides = [
            nothing.expand(slot.shape)
            for (slot, _), nothing in zip(slots, self._nothing.unbind(), strict=hides)
        ]
        parameters = [parameter for _, parameter in slots]
        self._inside = list(zip(parameters, insides, strict=True))
        self._outside = list(zip(parameters, outsides, strict=True)) if hides else self._inside
        self._names = [slot.names[0] for slot, _ in slots]
        _put(self._inside)
        self._note()
        self.hide()

    def show(self) -> None:
        """Make the parameters views of the buffer."""
        if self.hides:
            _put(self._inside)

    def hide(self) -> None:
        """Make the parameters NaN, in their own shapes, if this hides them."""
        if self.hides:
            _put(self._outside)

    def first_written(self) -> Name | None:
        """The first parameter, if there is one, that was written to while it was hidden or was a
        copy of its master, or that was given another tensor (``.data``, ``.to``) at any time.

        It would reach no master, so training would go on without it. Torch itself refuses most
        writes, because a hidden parameter is one number that is expanded, but not those to
        parameters of one element, and not ``fill_``. Writes through ``.data`` are not found here
        (see ``overwritten``).
        """
        pairs = zip(self._names, self._outside, strict=True)
        for one, (parameter, expected) in pairs:
            if parameter.data_ptr() != expected.data_ptr() or parameter.dtype != expected.dtype:
                return one
        if self._is_master or not _is_written(self._noted):
            return None
        each = zip(self._names, self._each, strict=True)
        return next(one for one, noted in each if _is_written(noted))

    def overwritten(self) -> Tensor:
        """Whether each hidden parameter has another value than NaN: numbers on its device."""
        return ~self._nothing.isnan()

    def name_of(self, number: int) -> Name:
        """The name of a parameter by its place in ``overwritten``."""
        return self._names[number]

    def undo_writes(self) -> None:
        """Give parameters their own tensors again, and hidden ones their NaN. A copy that was
        written to stays so, and ``first_written`` finds it again."""
        _put(self._outside)
        if self.hides:
            self._nothing.fill_(torch.nan)
            self._note()

    def _note(self) -> None:
        if self._is_master:
            return
        parameters = [parameter for parameter, _ in self._outside]
        self._noted, self._each = _noted(parameters), [_noted([one]) for one in parameters]


def _put(pairs: Iterable[tuple[nn.Parameter, Tensor]]) -> None:
    for parameter, tensor in pairs:
        parameter.data = tensor


def check_kept(held: Iterable[Held], gradients: Iterable[Tensor]) -> None:
    """Raise RuntimeError if a parameter no longer has the gradient that it was given, to which
    backwards add."""
    for one, gradient in zip(held, gradients, strict=True):
        if any(parameter.grad is not gradient for parameter in one.parameters):
            piece, name = one.slot.names[0]
            raise RuntimeError(
                f"layers[{piece}]: something has replaced the gradient of {name!r} during the step "
                "(leave .grad as it is)"
            )


# The buffers in which the gradients of one flat buffer are summed.


@dataclass
class Sums:
    """Makes buffers of ``size`` zeros.

    ``keeps``: one that was given back is used again. This is for jobs of one rank with one chunk,
    which hold a step's sums until the next step begins anyway: new memory of that size would cost a
    CPU a few percent of a step. With several chunks, the sums of those that come later in a step
    would add to the peak of the first backward; with more ranks a chunk's sums are freed as soon as
    they are reduced.
    """

    size: int
    dtype: torch.dtype
    device: torch.device
    keeps: bool
    _spare: Tensor | None = field(default=None, init=False)

    def make(self) -> Tensor:
        """A buffer of zeros."""
        spare, self._spare = self._spare, None
        return zeros(self.size, self.dtype, self.device) if spare is None else spare.zero_()

    def give_back(self, sums: Tensor | None) -> None:
        """Take a buffer that is not needed any more, if there is one."""
        if self.keeps and sums is not None:
            self._spare = sums


def zeros(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A buffer for gradients (a function of its own, so that traces can recognise the buffer)."""
    return torch.zeros(size, dtype=dtype, device=device)


# Reductions of flat gradients over shards or replicas, as work that a lane runs.
#
# A reduction reads the gradients directly. If it sends another number type, it first casts them
# into a buffer, and adds the result in the type of the gradients.


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
