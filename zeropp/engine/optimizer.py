"""An optimizer's state, described per parameter for checkpoints, and given back after loading."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from zeropp.engine.flat import FlatParameters
from zeropp.engine.flat_layout import Owned, Slot, Updater, is_of_elements, runs
from zeropp.engine.options import MakeOptimizer
from zeropp.layout import InfeasibleError, Layout
from zeropp.optimizer import build_optimizer, square_norm
from zeropp.training import OptimizerConfig

# What an optimizer keeps, and whether it works element by element: tried on a few numbers.
#
# The optimizer itself takes the steps, with its own settings, but on other tensors in place of its
# own. Afterwards it is as it was.


PROBED = 4  # elements
_VALUES, _GRADIENTS = (0.5, -1.5, 2.5, 0.25), (1.0, 2.0, -0.5, 0.125)


def kept_by(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """What the optimizer keeps of a tensor of ``PROBED`` elements after one step, by its own names,
    for each of its groups."""
    places = [[slice(0, PROBED)] for _ in optimizer.param_groups]
    with _standing_in(optimizer, places) as tensors:
        optimizer.step()
        return [dict(optimizer.state.get(one, {})) for (one,) in tensors]


def check_elementwise(optimizer: torch.optim.Optimizer) -> None:
    """Raise InfeasibleError for an optimizer that updates an element by looking at others, which
    may be on other ranks or belong to other parameters.

    Four elements at once must be updated like two and two. An optimizer that has made its state at
    construction (Adagrad) has none for other tensors and is not tried.
    """
    if optimizer.state:
        return
    name = type(optimizer).__name__
    try:
        whole, parts = (_after_two_steps(optimizer, size) for size in (PROBED, 2))
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise InfeasibleError(f"optimizer: {name} cannot take a step: {lines[0]}") from error
    if not torch.allclose(whole, parts, rtol=1e-5, equal_nan=True):
        raise InfeasibleError(
            f"optimizer: {name} does not work element by element (two parameters of two elements "
            "are updated in another way than one of four), so it cannot update parts of parameters "
            "(take one that does, such as AdamW or SGD)"
        )


def _after_two_steps(optimizer: torch.optim.Optimizer, size: int) -> Tensor:
    """Four numbers per group of the optimizer after two steps, in tensors of ``size`` elements."""
    places = [
        [slice(begin, begin + size) for begin in range(0, PROBED, size)]
        for _ in optimizer.param_groups
    ]
    with _standing_in(optimizer, places) as tensors:
        optimizer.step()
        optimizer.step()
        return torch.cat([one.detach().double().cpu() for lot in tensors for one in lot])


@contextmanager
def _standing_in(
    optimizer: torch.optim.Optimizer, places: Sequence[Sequence[slice]]
) -> Iterator[list[list[nn.Parameter]]]:
    """Inside this context the optimizer has no state, and each of its groups has small tensors
    instead of its own: one tensor per slice of ``places``, with those of the four test values."""
    groups, state = optimizer.param_groups, optimizer.state
    tensors = [
        [_stand_in(group["params"][0], place) for place in lot]
        for group, lot in zip(groups, places, strict=True)
    ]
    pairs = zip(groups, tensors, strict=True)
    optimizer.param_groups = [{**group, "params": list(lot)} for group, lot in pairs]
    optimizer.state = defaultdict(dict)
    try:
        yield tensors
    finally:
        optimizer.param_groups, optimizer.state = groups, state


def _stand_in(like: Tensor, place: slice) -> nn.Parameter:
    made = nn.Parameter(like.new_tensor(_VALUES[place]))
    made.grad = like.new_tensor(_GRADIENTS[place])
    return made


# The optimizer of what one rank updates, and the gradients that it reads.


TORN = (
    "an optimizer's error left some ranks updated and others not; build the model anew and load "
    "the last checkpoint"
)


def make_updater(
    flats: Iterable[FlatParameters],
    asked: OptimizerConfig | MakeOptimizer,
    device: torch.device,
    lr_schedule: Callable[[int], float] | None,
) -> Updater:
    """The optimizer that was asked for, over what this rank updates of the flat buffers; a group
    that this rank has nothing of has one empty tensor.

    Raises InfeasibleError for an optimizer that does not work element by element.
    """
    groups: defaultdict[str, list[nn.Parameter]] = defaultdict(list)
    for flat in flats:
        for one in flat.owned:
            groups[one.group].append(one.tensor)
    groups.default_factory = lambda: [nn.Parameter(torch.empty(0, device=device))]
    if not groups:  # optimizers refuse to have nothing at all
        groups["all"]
    clip_norm = 0.0
    optimizer = _made(asked, groups)
    if isinstance(asked, OptimizerConfig):
        clip_norm = asked.clip_norm
    else:
        check_elementwise(optimizer)
    _check_whole(optimizer, groups)
    names = {id(one): name for name, members in groups.items() for one in members}
    return Updater(optimizer, names, clip_norm, lr_schedule)


def _check_whole(
    optimizer: torch.optim.Optimizer, groups: Mapping[str, list[nn.Parameter]]
) -> None:
    """Refuse an optimizer that has left a group out."""
    known = {id(one) for group in optimizer.param_groups for one in group["params"]}
    for name, members in groups.items():
        if any(id(one) not in known for one in members):
            raise InfeasibleError(
                f"optimizer: has nothing of group {name!r}, whose parameters would never be "
                f"updated (give it groups[{name!r}], or freeze these parameters)"
            )


def state_bytes(asked: OptimizerConfig | MakeOptimizer, groups: Iterable[str]) -> dict[str, float]:
    """Bytes that the optimizer keeps of each element of each optimizer group, found by one step on
    a few numbers. Raises InfeasibleError as ``make_updater`` does."""
    tensors = {name: [nn.Parameter(torch.ones(PROBED))] for name in groups}
    given = defaultdict(lambda: [nn.Parameter(torch.empty(0))], tensors)
    optimizer = _made(asked, given)
    for (tensor,) in tensors.values():
        tensor.grad = torch.ones_like(tensor)
    if not isinstance(asked, OptimizerConfig):
        check_elementwise(optimizer)
    optimizer.step()
    return {
        name: sum(
            value.nbytes / PROBED
            for value in optimizer.state.get(tensor, {}).values()
            if is_of_elements(value, tensor)
        )
        for name, (tensor,) in tensors.items()
    }


def _made(
    asked: OptimizerConfig | MakeOptimizer, groups: Mapping[str, list[nn.Parameter]]
) -> torch.optim.Optimizer:
    if isinstance(asked, OptimizerConfig):
        return build_optimizer(chain.from_iterable(groups.values()), asked)
    made: object = asked(groups)
    if not isinstance(made, torch.optim.Optimizer):
        raise InfeasibleError(
            f"optimizer: gives {type(made).__name__}, but one torch.optim.Optimizer is needed"
        )
    return made


def square_norm_of(flats: Iterable[FlatParameters], layout: Layout, device: torch.device) -> Tensor:
    """This rank's part of the squared gradient norm; the parts of all ranks add up to it.

    Replicas that hold the same gradients count for one part of their number each.
    """
    copies = 1 if layout.replicate_zero else layout.replicate
    gradients = (one.tensor.grad for flat in flats for one in flat.owned)
    return square_norm(((one, copies) for one in gradients if one is not None), device)


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
