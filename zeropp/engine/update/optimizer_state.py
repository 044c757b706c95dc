"""What an optimizer keeps of its tensors and beside them, for checkpoints.

An optimizer makes its state in its first step. A checkpoint from before that has such state, too,
because a reader must name the tensors before it reads them; it counts only once a step was not
skipped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zeropp.engine.parameters.flat import FlatParameters
from zeropp.engine.parameters.flat_layout import OptimizerShard
from zeropp.engine.private_names import as_before
from zeropp.engine.update.optimizer import Updater
from zeropp.engine.update.update_rules import parts_of

Kept = Mapping[Any, Any]  # of one optimizer, by tensor, or by a key of its own


def kept_by(updater: Updater) -> Sequence[Kept]:
    """All that each optimizer keeps, of its tensors and beside them.

    Before its first update that is, beside what it has, what it keeps after a step with zeros for
    values and gradients; the optimizer itself, and what it updates, stay as they were.
    """
    parts = parts_of(updater.optimizer)
    return [part.state for part in parts] if updater.has_updated else _kept_to_be(parts)


def states(kept: Iterable[Kept], flats: Iterable[FlatParameters]) -> Iterator[OptimizerState]:
    """What an optimizer keeps of each tensor of the flat buffers."""
    every = {key: value for part in kept for key, value in part.items() if isinstance(key, Tensor)}
    for flat in flats:
        for shard in flat.owned:
            if values := every.get(shard.tensor):
                yield OptimizerState.of(flat, shard, values)


def take_over(
    updater: Updater, kept: Sequence[Kept], read: Iterable[OptimizerState], updates: int
) -> None:
    """Let an optimizer go on from what has been read into these states after this many steps that
    were not skipped, or, after none, from the start."""
    if not updates and not updater.begins_with_state:
        for part in parts_of(updater.optimizer) if updater.has_updated else ():
            part.state.clear()
        updater.has_updated = False
        return
    values = {state.shard.tensor: state.read() for state in read}
    for part, own in zip(parts_of(updater.optimizer), kept, strict=True):
        part.state.update({key: values.get(key, value) for key, value in own.items()})
    updater.has_updated = True


def set_own_numbers(part: torch.optim.Optimizer, numbers: Mapping[str, Any]) -> None:
    """Set what ``own_numbers`` gives."""
    saved = {key: numbers[f"own {key}"] for key in part.state_dict() if f"own {key}" in numbers}
    if saved:
        part.load_state_dict({**part.state_dict(), **saved})
    for key, number in numbers.items():
        kind, _, name = key.partition(" ")
        if kind == "attribute":
            setattr(part, name, number)
    kept: dict[Any, Any] = part.state
    for key in [key for key in kept if f"state {key}" in numbers]:
        like, number = kept[key], numbers[f"state {key}"]
        kept[key] = torch.full_like(like, number) if isinstance(like, Tensor) else number


def _kept_to_be(parts: Sequence[torch.optim.Optimizer]) -> Sequence[Kept]:
    tensors = [one for part in parts for group in part.param_groups for one in group["params"]]
    values = [(tensor.data, tensor.grad) for tensor in tensors]
    for tensor in tensors:  # in memory of its own: what is updated whole has none now
        tensor.data = torch.zeros_like(tensor, memory_format=torch.contiguous_format)
        tensor.grad = torch.zeros_like(tensor)
    made: list[dict[Any, Any]] = []
    try:
        for part in parts:
            before = part.state
            with as_before(part):
                part.step()
                made.append(part.state)
            for kept in made[-1].values():
                if isinstance(kept, dict) and "step" in kept:
                    kept["step"] *= 0  # no update has been made
            for key, value in before.items():
                is_of_tensor = isinstance(value, dict)
                made[-1][key] = {**made[-1].get(key, {}), **value} if is_of_tensor else value
    finally:
        for tensor, (data, gradient) in zip(tensors, values, strict=True):
            tensor.data, tensor.grad = data, gradient
    return made


@dataclass(frozen=True)
class OptimizerState:
    """What an optimizer keeps of one tensor.

    ``elements`` are the tensors of its own size, by kind and flat, which share memory with the
    optimizer's. ``others`` are copies, on the CPU, of what is kept of the tensor as a whole: a
    count of steps, or sums over the rows of a parameter that is updated whole. ``like`` has these
    as the optimizer keeps them, whose types and devices loaded ones take over.
    """

    flat: FlatParameters
    shard: OptimizerShard
    elements: Mapping[str, Tensor]
    others: Mapping[str, Tensor]
    like: Mapping[str, Any]

    @classmethod
    def of(
        cls, flat: FlatParameters, shard: OptimizerShard, values: Mapping[str, Any]
    ) -> OptimizerState:
        """The state of one tensor, sorted."""
        elements = {
            kind: value.view(-1)
            for kind, value in values.items()
            if isinstance(value, Tensor) and value.shape == shard.tensor.shape
        }
        like = {k: v for k, v in values.items() if k not in elements and v is not None}
        others = {kind: torch.as_tensor(value).cpu().clone() for kind, value in like.items()}
        return cls(flat, shard, elements, others, like)

    def read(self) -> dict[str, Any]:
        """What the optimizer is to keep, after all of this has been read."""
        shape = self.shard.tensor.shape
        state: dict[str, Any] = {kind: value.view(shape) for kind, value in self.elements.items()}
        for kind, like in self.like.items():
            value = self.others[kind]
            as_tensor = isinstance(like, Tensor)
            state[kind] = value.to(like, copy=True) if as_tensor else type(like)(value.item())
        return state
