"""The shards of one chunk: its parameters in flat buffers that are gathered and reduced together.

A chunk has one buffer for weights whose gradients may be delayed (so that memory for these
gradients is allocated only with the first of them), one for its other trained parameters, one for
frozen parameters, and one for each parameter that another pipeline rank has, too (so that both
ranks shard it in the same way).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import reduce
from operator import itemgetter

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zeropp.engine.collectives import DataGroups, new_group_in_each_pipeline
from zeropp.engine.deferred import hooks_of
from zeropp.engine.flat import FlatParameters, Held, Types, Views
from zeropp.engine.flat_layout import Cut, Name, lay_out
from zeropp.engine.lanes import Lanes
from zeropp.layout import InfeasibleError, Layout
from zeropp.literals import Precision, WireType
from zeropp.schedule.program import Schedule

GroupOf = Callable[[Name, nn.Parameter], str]
WIRE = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class ShardOptions:
    """How parameters are sharded. ``zero``: replicas split the optimizer's work (ZeRO-1);
    ``reduce_dtype``: what reductions send; ``group_of``: a parameter's optimizer group, by name;
    ``keeps_sums``: the memory of gradient sums is used again in the next step."""

    precision: Precision
    zero: bool
    reduce_dtype: WireType
    group_of: GroupOf
    keeps_sums: bool


class ChunkShards:
    """The shards of one chunk, which are gathered, released and reduced together.

    ``pieces`` are modules by their index in the model. ``deferred`` are the weights whose gradients
    may be delayed. ``tied`` are the two names of a parameter that the model uses twice; a parameter
    with either name has a buffer of its own.
    """

    def __init__(
        self,
        pieces: Mapping[int, nn.Module],
        *,
        groups: DataGroups,
        lanes: Lanes,
        options: ShardOptions,
        deferred: Iterable[nn.Parameter],
        tied: tuple[Name, Name] | None,
    ) -> None:
        self.pieces = list(pieces.values())
        self._groups, self._lanes, self._options = groups, lanes, options
        self.device = lanes.device
        self._deferred = {id(weight) for weight in deferred}
        found = _parameters(pieces)
        _tie(found, tied)
        self.flats = list(self._make_flats(found, tied or ()))

    def unshard(self) -> None:
        """Start to gather the parameters after the compute so far; call ``wait`` before using
        them."""
        for flat in self.flats:
            flat.unshard()

    def wait(self) -> None:
        """Let compute wait for the gather that was started."""
        for flat in self.flats:
            flat.wait()

    def reshard(self) -> None:
        """Free the gathered parameters; gradients stay."""
        for flat in self.flats:
            flat.reshard()

    def make_gradients(self, *, deferred: bool) -> None:
        """Give parameters gradients of zeros, to which backwards add, unless they have them;
        parameters whose gradients may be delayed get them only if ``deferred``."""
        for flat in self.flats:
            if deferred or not flat.deferred:
                flat.make_gradients()

    def reduce(self, *, cross: bool, bound: bool) -> None:
        """Start to sum the gradients over the shards, and then over the replicas if ``cross``.

        Compute waits for the reductions over the shards before this one, which bounds the memory
        that they keep to one chunk's gradients; ``bound``: for those over the replicas, too.
        """
        self._lanes.join_reductions()
        if bound:
            self._lanes.join_crossings()
        for flat in self.flats:
            flat.reduce(cross=cross)

    def finish(self) -> None:
        """Let compute wait for the reductions, and set the gradients that the optimizer uses."""
        self._lanes.join_reductions()
        self._lanes.join_crossings()
        for flat in self.flats:
            flat.finish()

    def clear_gradients(self) -> None:
        """Drop all gradients."""
        for flat in self.flats:
            flat.clear_gradients()

    def gather_updated(self) -> None:
        """Start to gather the rows that other replicas have updated."""
        for flat in self.flats:
            flat.gather_updated()

    def outlasting(self, x: Tensor) -> Tensor:
        """The tensor itself, or a copy of it where it lies in gathered parameters, whose memory is
        given back while the next stage may still need it."""
        mine = any(flat.is_in_buffer(x) for flat in self.flats)
        return x.clone() if mine else x

    def flat_of(self, name: Name) -> FlatParameters | None:
        """The buffer that holds a parameter; None if it is not in this chunk."""
        return next((flat for flat in self.flats if name in flat.names()), None)

    def gathered_bytes(self) -> int:
        """Bytes of gathered parameters, with those that are being gathered."""
        return sum(flat.gathered_bytes() for flat in self.flats)

    def unreduced_bytes(self) -> int:
        """Bytes of gradients whose reduction over the shards has not begun."""
        return sum(flat.unreduced_bytes() for flat in self.flats)

    def _make_flats(
        self, found: Sequence[_Found], tied: Sequence[Name]
    ) -> Iterator[FlatParameters]:
        lots: dict[tuple[bool, bool, Name | None, torch.dtype | None], list[_Found]] = defaultdict(
            list
        )
        for one in found:
            shared = next((name for name in one.names if name in tied), None)
            deferred = shared is None and id(one.parameters[0]) in self._deferred
            # Layers that compute in several types keep them; mixed precision has one for all.
            own = one.parameters[0].dtype if self._options.precision == "fp32" else None
            lots[one.trainable, deferred and one.trainable, shared, own].append(one)
        for (trainable, deferred, shared, _), lot in lots.items():
            # Both copies of a tied parameter are updated alike, so both ask by its first name.
            asked = None if shared is None else tied[0]
            yield self._make_flat(lot, asked, trainable=trainable, deferred=deferred)

    def _make_flat(
        self, lot: Sequence[_Found], asked: Name | None, *, trainable: bool, deferred: bool
    ) -> FlatParameters:
        """A buffer of these parameters; ``asked`` replaces the name that ``group_of`` is given."""
        options, groups = self._options, self._groups
        zero = options.zero and trainable
        rows = groups.replicas if zero else 1
        cut = Cut(groups.shard, groups.shards, groups.replica if zero else 0, rows)
        held = {one.names: one.parameters for one in lot}
        group_of = options.group_of
        layout = lay_out(
            (
                (
                    one.names,
                    one.parameters[0].shape,
                    group_of(asked or one.names[0], one.parameters[0]),
                )
                for one in lot
            ),
            cut,
        )
        return FlatParameters(
            [Held(slot, tuple(held[slot.names])) for slot in layout.slots],
            layout,
            groups=groups,
            lanes=self._lanes,
            types=_types(lot, options),
            zero=zero,
            trainable=trainable,
            deferred=deferred,
            keeps_sums=options.keeps_sums,
        )


def settle(flats: Iterable[FlatParameters]) -> None:
    """Let compute wait until the masters of all buffers are those of the last update."""
    for flat in flats:
        if flat.updated is not None:
            flat.updated.wait()


def check_unwritten(flats: Iterable[FlatParameters]) -> None:
    """Raise RuntimeError if a parameter was written to in a way that masters do not see; see
    ``Views``. What was done is undone, but for writes to a copy of the masters."""
    all_views = [flat.views for flat in flats]
    written = [(found, views) for views in all_views if (found := views.first_written())]
    if not written:
        written = [*_overwritten([views for views in all_views if views.hides])]
    if not written:
        return
    (piece, name), first = min(written, key=itemgetter(0))
    for _, views in written:
        views.undo_writes()
    undone = first.first_written() is None
    done = "the write was undone" if undone else "save, and build the model anew"
    raise RuntimeError(
        f"layers[{piece}]: {name!r} was written to after parallelize, which has no effect on what "
        f"the optimizer updates; {done} (set values before parallelize, or with the model's "
        "load_state_dict)"
    )


def _overwritten(hiding: Sequence[Views]) -> Iterator[tuple[Name, Views]]:
    """The hidden parameters whose values were overwritten. One number is read from the device for
    all of them, for which the host waits."""
    found = [views.overwritten() for views in hiding]
    if found and bool(torch.cat(found).any()):
        for views, numbers in zip(hiding, found, strict=True):
            for number in torch.nonzero(numbers).flatten().tolist():
                yield views.name_of(number), views


@contextmanager
def shown(chunks: Iterable[ChunkShards]) -> Iterator[None]:
    """Inside this context parameters are views of their buffers; see ``Views``."""
    all_views = [flat.views for shards in chunks for flat in shards.flats]
    for views in all_views:
        views.show()
    try:
        yield
    finally:
        for views in all_views:
            views.hide()


@dataclass
class _Found:
    """A parameter with all its names in the chunk, or several that are tied."""

    names: tuple[Name, ...]
    parameters: list[nn.Parameter]

    @property
    def trainable(self) -> bool:
        return self.parameters[0].requires_grad


def _parameters(pieces: Mapping[int, nn.Module]) -> list[_Found]:
    """All parameters, each once, in the order of the model."""
    found: dict[int, _Found] = {}
    for index, piece in pieces.items():
        for name, parameter in piece.named_parameters(remove_duplicate=False):
            if not parameter.is_floating_point():
                raise InfeasibleError(
                    f"{index}.{name}: parameters of type {parameter.dtype} cannot be sharded "
                    "(make it a buffer)"
                )
            if parameter.requires_grad and hooks_of(parameter.register_post_accumulate_grad_hook):
                raise InfeasibleError(
                    f"{index}.{name}: has a hook of register_post_accumulate_grad_hook, but a "
                    "gradient is whole only after the sums over all ranks (remove the hook; "
                    "register_hook works)"
                )
            one = found.setdefault(id(parameter), _Found((), [parameter]))
            one.names += ((index, name),)
    return list(found.values())


def _tie(found: list[_Found], tied: tuple[Name, Name] | None) -> None:
    """Make two parameters of this chunk one, if the model ties them."""
    if tied is None:
        return
    ends = [one for name in tied for one in found if name in one.names]
    if len(ends) == 2 and ends[0] is not ends[1]:
        original, copy = ends
        original.names += copy.names
        original.parameters += copy.parameters
        found.remove(copy)


def _types(lot: Iterable[_Found], options: ShardOptions) -> Types:
    dtypes = [parameter.dtype for one in lot for parameter in one.parameters]
    master = reduce(torch.promote_types, dtypes, torch.float32)
    wire = master if options.reduce_dtype == "fp32" else WIRE[options.reduce_dtype]
    compute = torch.bfloat16 if options.precision == "bf16" else master
    return Types(master, compute, wire)


# A parameter that the model uses in its first and last layer (tied embeddings), on two ranks.
#
# Each of the two pipeline ranks keeps a sharded copy. The copies begin equal, and their gradients
# are summed before every optimizer step, so they stay equal. Each is in a flat buffer of its own,
# and both buffers are cut in the same way, so that corresponding ranks have the same part. If both
# uses are in one chunk, they are one parameter and nothing of this is needed.


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
