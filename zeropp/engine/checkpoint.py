"""Checkpoints through torch.distributed.checkpoint, readable in any other topology.

Everything is saved under the model's own names, ``{piece}.{parameter}``, in the model's own shapes;
the pipeline rank, the shard and the replica are no part of a name. A rank's stretch of a flat
buffer is, in each parameter, a few boxes (rows, and parts of rows); each box is written as it lies
in memory, so nothing is gathered and nothing is copied. A process without any parallelism reads the
same checkpoint into a plain state dict.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from zeropp.engine.checkpoint_directory import checked, write_whole
from zeropp.engine.flat import FlatParameters
from zeropp.engine.flat_layout import Slot, Stretch


@dataclass(frozen=True)
class Part:
    """This rank's boxes of one tensor of the given shape: (offsets in it, values)."""

    shape: tuple[int, ...]
    boxes: tuple[tuple[tuple[int, ...], Tensor], ...]

    def chunks(self) -> list[ChunkStorageMetadata]:
        """Where the boxes lie."""
        return [ChunkStorageMetadata(torch.Size(o), tensor.size()) for o, tensor in self.boxes]

    def box(self, index: MetadataIndex) -> Tensor:
        """The box that begins at the index's offset."""
        return next(tensor for offset, tensor in self.boxes if offset == tuple(index.offset or ()))


@dataclass(frozen=True)
class State:
    """What one rank saves: parts of tensors, and whole values that all ranks share. Tensors share
    memory with what they describe."""

    parts: dict[str, Part]
    whole: dict[str, Any]


def state_of(
    flats: Iterable[FlatParameters], optimizer: torch.optim.Optimizer, steps_done: int
) -> State:
    """The state of one rank, whose buffers are settled."""
    prepare_optimizer(optimizer)
    state = State({}, {"steps_done": torch.tensor(steps_done)})
    for flat in flats:
        owned = flat.layout.owned
        _describe(state, "model.{}", flat, flat.rows, owned)
        for group, mine in flat.layout.groups() if flat.trainable else ():
            for kind, value in optimizer.state[flat.owned[group]].items():
                if not isinstance(value, Tensor):
                    continue
                name = f"optimizer.{{}}.{kind}"
                if value.dim():
                    _describe(state, name, flat, value, mine)
                else:
                    names = _names_in(flat, mine)
                    state.whole.update({name.format(key): value for key in names})
    return state


def save(state: State, directory: Path | str) -> None:
    """Write a state, whole or not at all; collective."""

    def write(place: Path) -> None:
        planner = _SavePlanner(state.parts)
        state_dict_saver.save(state.whole, checkpoint_id=str(place), planner=planner)

    write_whole(Path(directory), write)


def load(state: State, directory: Path | str) -> int:
    """Read into the tensors of a state; collective. Gives the number of steps done.

    Raises CheckpointError where the checkpoint is not whole.
    """
    place = checked(Path(directory))
    with torch.no_grad():
        planner = _LoadPlanner(state.parts)
        state_dict_loader.load(state.whole, checkpoint_id=str(place), planner=planner)
    return int(state.whole["steps_done"])


def prepare_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Make an optimizer's state exist, all zeros, if it has none yet: one step of rate zero."""
    if optimizer.state:
        return
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, Tensor):
                value.zero_()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def boxes(shape: Sequence[int], stretch: Stretch) -> Iterator[tuple[tuple[int, ...], Stretch]]:
    """A stretch of a tensor's elements, in the order of memory, as boxes: (offsets, elements).

    At most two boxes per dimension and one more: parts of the first and the last row, and the rows
    between.
    """
    if not len(stretch):
        return
    if len(shape) < 2:
        yield (stretch.begin,) * len(shape), stretch
        return
    inner = prod(shape[1:])
    first, last = -(-stretch.begin // inner), stretch.end // inner
    if first <= last:
        ends = Stretch(stretch.begin, first * inner), Stretch(last * inner, stretch.end)
    else:  # within one row
        ends = stretch, Stretch(0, 0)
    yield from _boxes_in_row(shape, ends[0])
    if first < last:
        yield (first,) + (0,) * (len(shape) - 1), Stretch(first * inner, last * inner)
    yield from _boxes_in_row(shape, ends[1])


def box_sizes(shape: Sequence[int], offsets: Sequence[int], count: int) -> tuple[int, ...]:
    """The sizes of a box of ``count`` elements that ``boxes`` found at the offsets."""
    sizes, full = [1] * len(shape), 1
    for dim in reversed(range(len(shape))):
        sizes[dim] = min(count // full, shape[dim])
        full *= sizes[dim]
        if sizes[dim] < shape[dim] or offsets[dim]:
            break
    return tuple(sizes)


def _boxes_in_row(
    shape: Sequence[int], stretch: Stretch
) -> Iterator[tuple[tuple[int, ...], Stretch]]:
    if not len(stretch):
        return
    row, inner = stretch.begin // prod(shape[1:]), prod(shape[1:])
    local = Stretch(stretch.begin - row * inner, stretch.end - row * inner)
    for offsets, found in boxes(shape[1:], local):
        yield (row, *offsets), Stretch(found.begin + row * inner, found.end + row * inner)


def _describe(state: State, name: str, flat: FlatParameters, tensor: Tensor, held: Stretch) -> None:
    """Add what ``tensor``, which holds a stretch of the flat buffer, has of every parameter."""
    for slot in flat.layout.slots:
        part = _part(slot, tensor, held)
        if part.boxes:
            for key in _keys(slot):
                state.parts[name.format(key)] = part


def _part(slot: Slot, tensor: Tensor, held: Stretch) -> Part:
    if 0 in slot.shape:
        return Part(slot.shape, ((tuple(0 for _ in slot.shape), tensor.new_empty(slot.shape)),))
    mine = slot.stretch.meet(held)
    inside = Stretch(mine.begin - slot.begin, mine.end - slot.begin)
    found = []
    for offsets, stretch in boxes(slot.shape, inside):
        begin = slot.begin + stretch.begin
        values = tensor[Stretch(begin, begin + len(stretch)).inside(held)]
        found.append((offsets, values.view(box_sizes(slot.shape, offsets, len(stretch)))))
    return Part(slot.shape, tuple(found))


def _names_in(flat: FlatParameters, mine: Stretch) -> Iterator[str]:
    for slot in flat.layout.slots:
        if len(slot.stretch.meet(mine)):
            yield from _keys(slot)


def _keys(slot: Slot) -> Iterator[str]:
    for piece, name in slot.names:
        yield f"{piece}.{name}"


class _SavePlanner(DefaultSavePlanner):
    """Writes parts beside what torch's planner writes."""

    def __init__(self, parts: dict[str, Part]) -> None:
        super().__init__()
        self._parts = parts

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        items = [item for name, part in self._parts.items() for item in _write_items(name, part)]
        paths = (plan.planner_data or {}) | {name: (name,) for name in self._parts}
        self.plan = replace(plan, items=[*plan.items, *items], planner_data=paths)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        part = self._parts.get(index.fqn)
        return super().lookup_object(index) if part is None else part.box(index)


class _LoadPlanner(DefaultLoadPlanner):
    """Reads parts beside what torch's planner reads."""

    def __init__(self, parts: dict[str, Part]) -> None:
        super().__init__()
        self._parts = parts

    def create_local_plan(self) -> LoadPlan:
        plan = super().create_local_plan()
        assert self.metadata is not None
        items = list(plan.items)
        for name, part in self._parts.items():
            saved = self.metadata.state_dict_metadata.get(name)
            if not isinstance(saved, TensorStorageMetadata) or saved.size != part.shape:
                size = tuple(saved.size) if isinstance(saved, TensorStorageMetadata) else "nothing"
                raise ValueError(f"{name}: the checkpoint has {size}, the model {part.shape}")
            items += create_read_items_for_chunk_list(name, saved, part.chunks())
        return replace(plan, items=items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        part = self._parts.get(index.fqn)
        return super().lookup_tensor(index) if part is None else part.box(index)


def _write_items(name: str, part: Part) -> Iterator[WriteItem]:
    for chunk, (_, tensor) in zip(part.chunks(), part.boxes, strict=True):
        data = TensorWriteData(
            chunk, TensorProperties.create_from_tensor(tensor), torch.Size(part.shape)
        )
        yield WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=data)
