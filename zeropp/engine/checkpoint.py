"""Checkpoints through torch.distributed.checkpoint, which any other topology can load.

Everything is saved under the model's own names, ``{piece}.{parameter}``, and in the model's own
shapes; names do not depend on pipeline rank, shard or replica. Each rank writes the boxes that it
holds of every tensor (``zeropp.engine.part``). A process without parallelism can read the same
checkpoint into a plain state dict.

An optimizer keeps state of a parameter from the parameter's first gradient on. A checkpoint has
such state for every parameter, because a reader must name the tensors before it reads them: zeros
where no gradient has come yet. The number ``begun`` beside it is 1 if the state counts, else 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemReader

from zeropp.engine.checkpoint_directory import checked, write_whole
from zeropp.engine.flat import FlatParameters
from zeropp.engine.flat_layout import Slot, Stretch
from zeropp.engine.kept import BEGUN, Kept, kept_of, take_over
from zeropp.engine.owned import Updater
from zeropp.engine.part import Part, make_part
from zeropp.engine.together import together

OPTIMIZER, SETTINGS, STEPS = "optimizer", "param_groups", "steps_done"
Settings = tuple[tuple[str, Any], ...]  # of one optimizer group: names and values
# Settings that say how an optimizer computes depend on the machine, so they are not saved.
_OF_MACHINE = {"foreach", "fused", "capturable", "differentiable"}


@dataclass(frozen=True, kw_only=True)
class State:
    """What one rank saves, by name; tensors share memory with what they describe.

    ``model``: parts of parameters, trained and frozen, and persistent buffers. ``optimizer``: parts
    of what the optimizer keeps for each parameter, named ``{piece}.{parameter}.{kind}``, and its
    numbers. ``settings``: learning rate and other numbers of each optimizer group, by its name.
    ``kept``: the same as ``optimizer``, per flat tensor that the optimizer updates.
    """

    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    settings: dict[str, Settings]
    steps_done: Tensor
    kept: list[tuple[FlatParameters, Kept]]

    def named(self) -> dict[str, Any]:
        """The state as one dict: the names of the unsharded model, and beside them ``optimizer``
        and ``steps_done``, which cannot be names of parameters, as these begin with a number."""
        optimizer: dict[str, Any] = {**self.optimizer}
        if self.settings:
            optimizer[SETTINGS] = self.settings
        beside = {OPTIMIZER: optimizer} if optimizer else {}
        return {**self.model, **beside, STEPS: self.steps_done}


def state_of(
    flats: Iterable[FlatParameters],
    updater: Updater,
    steps_done: int,
    buffers: Mapping[str, Tensor],
) -> State:
    """The state of one rank, whose flat parameters are settled.

    Raises InfeasibleError for an optimizer that keeps something which cannot be cut like the
    parameters.
    """
    state = State(
        model=dict(buffers),
        optimizer={},
        settings=_settings_of(updater),
        steps_done=torch.tensor(steps_done),
        kept=[],
    )
    trained = []
    for flat in flats:
        state.model.update(_described("{}", flat, flat.rows, flat.layout.owned))
        trained += [flat] if flat.trainable else []
    for flat, kept in kept_of(trained, updater):
        state.kept.append((flat, kept))
        for kind, value in kept.elements.items():
            named = _described(f"{{}}.{kind}", flat, value, kept.one.stretch)
            state.optimizer.update(named)
        for slot, numbers in kept.numbers.items():
            for kind, number in numbers.items():
                state.optimizer.update((f"{key}.{kind}", number) for key in _keys(slot))
    return state


def persistent_buffers(pieces: Iterable[tuple[int, nn.Module]]) -> dict[str, Tensor]:
    """The buffers that belong to the model's state dict, named ``{piece}.{buffer}``."""
    return {
        f"{index}.{name}": buffer
        for index, piece in pieces
        for saved in [piece.state_dict(keep_vars=True)]
        for name, buffer in piece.named_buffers(remove_duplicate=False)
        if name in saved
    }


def save(state: State, directory: Path | str) -> None:
    """Write a state, whole or not at all, under the names that torch's ``save({"model": ...})``
    gives; collective."""

    def write(place: Path) -> None:
        state_dict_saver.save({"model": state.named()}, checkpoint_id=str(place))

    write_whole(directory, write)


def load(state: State, directory: Path | str) -> None:
    """Read into the tensors of a state; collective.

    A checkpoint of an older version has no ``begun``: if it was saved after a step, the optimizer's
    state of every parameter counts. Settings of optimizer groups that the checkpoint does not know
    stay as they are. Raises CheckpointError where the checkpoint is not whole.
    """
    place = checked(directory)
    known = together(lambda: FileSystemReader(place).read_metadata().state_dict_metadata)
    unsaid = {
        name: number
        for name, number in state.optimizer.items()
        if name.endswith(f".{BEGUN}") and f"model.{OPTIMIZER}.{name}" not in known
    }
    said = {name: value for name, value in state.optimizer.items() if name not in unsaid}
    group = f"model.{OPTIMIZER}.{SETTINGS}.{{}}".format
    settings = {name: own for name, own in state.settings.items() if group(name) in known}
    with torch.no_grad():
        asked = {"model": replace(state, optimizer=said, settings=settings).named()}
        state_dict_loader.load(asked, checkpoint_id=str(place))
    state.settings.update(settings)
    for number in unsaid.values():
        number.fill_(int(state.steps_done) > 0)


def go_on_from(state: State, updater: Updater) -> None:
    """Let an optimizer go on from what has been read into the tensors and settings of a state."""
    for flat, kept in state.kept:
        flat.owned = [new for one in flat.owned for new in take_over(kept, one, updater)]
    for group in updater.optimizer.param_groups:
        for one in group["params"]:
            for key, value in state.settings.get(updater.groups.get(id(one), ""), ()):
                if isinstance(group.get(key), Tensor):
                    group[key].fill_(value)
                else:
                    group[key] = value


def _settings_of(updater: Updater) -> dict[str, Settings]:
    """The settings of each optimizer group that are numbers (also as tensors, which torch allows
    for learning rates), switches or tuples of them, by the group's name. A learning-rate scheduler
    may have changed or added some."""
    return {
        updater.groups[id(one)]: tuple(
            (key, plain)
            for key, value in group.items()
            for plain in [value.item() if _is_number(value) else value]
            if key not in _OF_MACHINE and _is_plain(plain)
        )
        for group in updater.optimizer.param_groups
        for one in group["params"]
        if id(one) in updater.groups
    }


def _is_number(value: object) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple):
        return all(_is_plain(one) for one in value)
    return value is None or isinstance(value, (bool, int, float))


def boxes(shape: Sequence[int], stretch: Stretch) -> Iterator[tuple[tuple[int, ...], Stretch]]:
    """Cut a stretch of a tensor's elements, in the order of memory, into boxes: pairs of a box's
    offsets in the tensor and its own stretch.

    These are parts of the first and of the last row, and one box of the rows between them. A part
    of a row is cut in the same way, so n dimensions give at most 2n - 1 boxes.
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
    """The sizes of the box of ``count`` elements that ``boxes`` has cut at ``offsets``."""
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


def _described(
    name: str, flat: FlatParameters, tensor: Tensor, held: Stretch
) -> Iterator[tuple[str, Part]]:
    """The part of every parameter in ``tensor``, which holds the stretch ``held`` of the flat
    buffer, by name. ``name`` is a format that gets the parameter's name."""
    for slot in flat.layout.slots:
        found = _boxes_of(slot, tensor, held)
        if found:
            part = make_part(slot.shape, found)
            yield from ((name.format(key), part) for key in _keys(slot))


def _boxes_of(slot: Slot, tensor: Tensor, held: Stretch) -> list[tuple[tuple[int, ...], Tensor]]:
    if 0 in slot.shape:
        return [(tuple(0 for _ in slot.shape), tensor.new_empty(slot.shape))]
    mine = slot.stretch.meet(held)
    inside = Stretch(mine.begin - slot.begin, mine.end - slot.begin)
    found = []
    for offsets, stretch in boxes(slot.shape, inside):
        begin = slot.begin + stretch.begin
        values = tensor[Stretch(begin, begin + len(stretch)).inside(held)]
        found.append((offsets, values.view(box_sizes(slot.shape, offsets, len(stretch)))))
    return found


def _keys(slot: Slot) -> Iterator[str]:
    for piece, name in slot.names:
        yield f"{piece}.{name}"
