"""Checkpoints through torch.distributed.checkpoint, which any other topology can load.

Everything is saved under the model's own names, ``{piece}.{parameter}``, and in the model's own
shapes; names do not depend on pipeline rank, shard or replica. Each rank writes the boxes that it
holds of every tensor (``zeropp.engine.part``). A process without parallelism can read the same
checkpoint into a plain state dict.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

from zeropp.engine.checkpoint_directory import checked, write_whole
from zeropp.engine.flat import FlatParameters
from zeropp.engine.flat_layout import Slot, Stretch
from zeropp.engine.part import Part, make_part

OPTIMIZER, SETTINGS, STEPS = "optimizer", "param_groups", "steps_done"
Settings = tuple[tuple[str, Any], ...]  # of one optimizer group: names and values
# Settings that say how an optimizer computes depend on the machine, so they are not saved.
_OF_MACHINE = {"foreach", "fused", "capturable", "differentiable"}


@dataclass(frozen=True, kw_only=True)
class State:
    """What one rank saves, by name. Tensors share memory with the model's and the optimizer's.

    ``model``: this rank's parts of all parameters, trained and frozen, and the persistent buffers.
    ``optimizer``: its parts of the optimizer's state, named ``{piece}.{parameter}.{kind}``.
    ``settings``: learning rate and other settings of each optimizer group, by the group's name.
    ``unbegun``: if the optimizer has no state yet, the state that its first step would make for
    each of its tensors; the tensors in ``optimizer`` are then parts of this state.
    """

    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    settings: dict[str, Settings]
    steps_done: Tensor
    unbegun: dict[Tensor, dict[str, Any]]

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
    optimizer: torch.optim.Optimizer,
    *,
    group_names: Mapping[int, str],
    steps_done: int,
    buffers: Mapping[str, Tensor],
) -> State:
    """The state of one rank; ``flats`` must be settled. ``group_names``: the optimizer group of a
    tensor, by the tensor's identity."""
    settings = _settings_of(optimizer, group_names)
    unbegun = _state_to_be(optimizer)
    kept = unbegun or optimizer.state
    state = State(
        model=dict(buffers),
        optimizer={},
        settings=settings,
        steps_done=torch.tensor(steps_done),
        unbegun=unbegun,
    )
    for flat in flats:
        owned = flat.layout.owned
        state.model.update(_described("{}", flat, flat.rows, owned))
        for group, mine in flat.layout.groups() if flat.trainable else ():
            for kind, value in kept.get(flat.owned[group], {}).items():
                if not isinstance(value, Tensor):
                    continue
                name = f"{{}}.{kind}"
                if value.dim():
                    state.optimizer.update(_described(name, flat, value, mine))
                else:
                    state.optimizer.update({name.format(key): value for key in _names(flat, mine)})
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
    """Write a state, whole or not at all, as torch's ``save({"model": ...})`` names it;
    collective."""

    def write(place: Path) -> None:
        state_dict_saver.save({"model": state.named()}, checkpoint_id=str(place))

    write_whole(Path(directory), write)


def load(state: State, directory: Path | str) -> None:
    """Read a checkpoint into the tensors of a state; collective. Raises CheckpointError if the
    checkpoint is not whole."""
    place = checked(Path(directory))
    with torch.no_grad():
        state_dict_loader.load({"model": state.named()}, checkpoint_id=str(place))


def go_on_from(
    state: State, optimizer: torch.optim.Optimizer, group_names: Mapping[int, str]
) -> None:
    """Give an optimizer the state and the settings that were read into ``state``."""
    if int(state.steps_done):  # otherwise its first step makes its state
        optimizer.state.update(state.unbegun)
    for group in optimizer.param_groups:
        for one in group["params"]:
            group.update(state.settings.get(group_names.get(id(one), ""), ()))


def _settings_of(
    optimizer: torch.optim.Optimizer, group_names: Mapping[int, str]
) -> dict[str, Settings]:
    """The settings of every group that are numbers, switches or tuples of them, some of which a
    scheduler may have changed or added."""
    return {
        group_names[id(one)]: tuple(
            (key, value)
            for key, value in group.items()
            if key not in _OF_MACHINE and _is_plain(value)
        )
        for group in optimizer.param_groups
        for one in group["params"]
        if id(one) in group_names
    }


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple):
        return all(_is_plain(one) for one in value)
    return value is None or isinstance(value, (bool, int, float))


def _state_to_be(optimizer: torch.optim.Optimizer) -> dict[Tensor, dict[str, Any]]:
    """Zeros in the form of the state that an optimizer without state will make, found by a step
    with learning rate zero. The optimizer is left without state, because not every state begins
    with zeros (NAdam's ``mu_product``, Rprop's ``step_size``)."""
    if optimizer.state:
        return {}
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    made: dict[Tensor, dict[str, Any]] = dict(optimizer.state)
    optimizer.state.clear()
    for state in made.values():
        for value in state.values():
            if isinstance(value, Tensor):
                value.zero_()
    return made


def boxes(shape: Sequence[int], stretch: Stretch) -> Iterator[tuple[tuple[int, ...], Stretch]]:
    """Cut a stretch of a tensor's elements, in the order of memory, into boxes: pairs of a box's
    offsets in the tensor and its own stretch.

    There are at most two boxes per dimension and one more: parts of the first and the last row, and
    the rows between them.
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


def _names(flat: FlatParameters, mine: Stretch) -> Iterator[str]:
    for slot in flat.layout.slots:
        if len(slot.stretch.meet(mine)):
            yield from _keys(slot)


def _keys(slot: Slot) -> Iterator[str]:
    for piece, name in slot.names:
        yield f"{piece}.{name}"
