"""An optimizer's state, described per parameter for checkpoints, and given back after loading."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zeropp.engine.flat import FlatParameters
from zeropp.engine.flat_layout import Slot
from zeropp.engine.owned import Owned, Updater, is_of_elements, runs
from zeropp.engine.probe import PROBED, kept_by
from zeropp.layout import InfeasibleError

BEGUN = "begun"  # name of a number in checkpoints: 1 once a parameter has had a gradient, else 0


@dataclass(frozen=True)
class Kept:
    """What an optimizer keeps of one tensor, or would keep after a first step on it.

    ``elements`` are the tensors of its own size, by kind, which share memory with the optimizer's.
    ``numbers`` are those of the whole tensor (a count of steps), copied for each parameter in it,
    and ``begun``, on the CPU. ``like`` has one value of each kind as the optimizer keeps it, whose
    type, element type and device a loaded number takes over.
    """

    one: Owned
    elements: Mapping[str, Tensor]
    numbers: Mapping[Slot, Mapping[str, Tensor]]
    like: Mapping[str, Any]


def kept_of(
    flats: Iterable[FlatParameters], updater: Updater
) -> Iterator[tuple[FlatParameters, Kept]]:
    """What the optimizer keeps of each tensor of the flat buffers, without those of which it keeps
    nothing.

    Raises InfeasibleError where that is neither one number per element nor one per parameter.
    """
    state = updater.optimizer.state
    pairs = [(flat, one) for flat in flats for one in flat.owned]
    unbegun = any(not state.get(one.tensor) for _, one in pairs)
    to_be = _kept_to_be(updater) if unbegun else {}
    for flat, one in pairs:
        mine = state.get(one.tensor)
        values = mine or to_be.get(id(one.tensor))
        if values:
            yield flat, _kept(flat, one, values, begun=bool(mine))


def take_over(kept: Kept, one: Owned, updater: Updater) -> list[Owned]:
    """Give the optimizer what has been read into ``kept``, if it belongs to this tensor; the tensor
    is split where its parameters' numbers differ. Gives the tensors that are then in its place."""
    if one.tensor is not kept.one.tensor:
        return [one]
    stretches = runs(one, kept.numbers, lambda slot: _by_value(kept.numbers[slot]))
    made = updater.split(one, [stretch for stretch, _ in stretches])
    for new, (stretch, numbers) in zip(made, stretches, strict=True):
        begun = dict(numbers)
        if not begun.pop(BEGUN):
            updater.optimizer.state.pop(new.tensor, None)
            continue
        inside = stretch.inside(one.stretch)
        parts: dict[str, Any] = {kind: value[inside] for kind, value in kept.elements.items()}
        parts |= {kind: _number_like(kept.like[kind], value) for kind, value in begun.items()}
        updater.optimizer.state[new.tensor] = parts
    return made


def _kept_to_be(updater: Updater) -> dict[int, dict[str, Any]]:
    """For tensors of which the optimizer keeps nothing yet: zeros of the shapes and types that it
    would keep, by the tensors' identities."""
    optimizer, found = updater.optimizer, {}
    for group, kept in zip(optimizer.param_groups, kept_by(optimizer), strict=True):
        probed = group["params"][0].dtype  # the tensors of a group may have several types
        for tensor in group["params"]:
            if not optimizer.state.get(tensor):
                found[id(tensor)] = {
                    kind: _zeros_for(tensor, value, probed) for kind, value in kept.items()
                }
    return found


def _zeros_for(tensor: Tensor, value: Any, probed: torch.dtype) -> Any:
    """Zeros for each element of a tensor where ``value``, which the optimizer keeps of a tensor of
    type ``probed``, has one number per element; other values as they are."""
    if not isinstance(value, Tensor) or value.shape != (PROBED,):
        return value
    dtype = tensor.dtype if value.dtype == probed else value.dtype
    return torch.zeros_like(tensor, dtype=dtype).detach()


def _kept(flat: FlatParameters, one: Owned, values: Mapping[str, Any], *, begun: bool) -> Kept:
    elements: dict[str, Tensor] = {}
    like: dict[str, Any] = {}
    for kind, value in values.items():
        if is_of_elements(value, one.tensor):
            elements[kind] = value
        elif isinstance(value, (bool, int, float)) or (
            isinstance(value, Tensor) and not value.dim()
        ):
            like[kind] = value
        elif value is not None:
            raise InfeasibleError(
                f"state_dict: the optimizer keeps {kind!r} of a parameter, which is neither one "
                "number nor one per element, so no other topology could load it"
            )
    numbers = {
        slot: {
            BEGUN: torch.tensor(int(begun)),
            **{kind: _copied(value, begun=begun) for kind, value in like.items()},
        }
        for slot in flat.layout.slots
        if slot.group == one.group and len(slot.stretch.meet(one.stretch))
    }
    return Kept(one, elements, numbers, like)


def _copied(value: Any, *, begun: bool) -> Tensor:
    number = value.detach().cpu().clone() if isinstance(value, Tensor) else torch.tensor(value)
    return number if begun else torch.zeros_like(number)


def _by_value(numbers: Mapping[str, Tensor]) -> tuple[tuple[str, Any], ...]:
    return tuple((kind, number.item()) for kind, number in numbers.items())


def _number_like(like: Any, value: Any) -> Any:
    """A number as an optimizer had it: a Python number, or a tensor on its device."""
    return torch.full_like(like, value) if isinstance(like, Tensor) else type(like)(value)
