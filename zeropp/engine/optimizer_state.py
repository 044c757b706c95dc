"""What an optimizer keeps of its tensors, for checkpoints.

An optimizer makes its state in its first step. A checkpoint from before that has such state, too,
because a reader must name the tensors before it reads them; it counts only once a step was not
skipped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from zeropp.engine.checkpoint_private_names import without_hooks
from zeropp.engine.flat import FlatParameters
from zeropp.engine.flat_layout import OptimizerShard
from zeropp.engine.optimizer import Updater
from zeropp.engine.update_rules import is_of_elements


def states(updater: Updater, flats: Iterable[FlatParameters]) -> Iterator[OptimizerState]:
    """What an optimizer keeps of each tensor of the flat buffers.

    Before its first update that is what it keeps after a step with zeros for values and gradients,
    at step 0; the optimizer itself, and what it updates, stay as they were.
    """
    kept = updater.optimizer.state or _state_to_be(updater.optimizer)
    for flat in flats:
        for shard in flat.owned:
            if values := kept.get(shard.tensor):
                yield OptimizerState.of(flat, shard, values)


def take_over(updater: Updater, read: Iterable[OptimizerState], updates: int) -> None:
    """Let an optimizer go on from what has been read into these states after so many steps that
    were not skipped, or, after none, from the start."""
    if not updates and not updater.begins_with_state:
        updater.optimizer.state.clear()
        return
    for state in read:
        updater.optimizer.state[state.shard.tensor] = state.read()


def _state_to_be(optimizer: torch.optim.Optimizer) -> Mapping[Tensor, dict[str, Any]]:
    settings = [dict(group) for group in optimizer.param_groups]
    tensors = list(chain.from_iterable(group["params"] for group in settings))
    values = [(tensor.data, tensor.grad) for tensor in tensors]
    for tensor in tensors:  # in memory of its own: what is updated whole has none now
        tensor.data = torch.zeros_like(tensor, memory_format=torch.contiguous_format)
        tensor.grad = torch.zeros_like(tensor)
    try:
        with without_hooks(optimizer):  # no update is under way, in which they could clip
            optimizer.step()
    finally:
        for group, before in zip(optimizer.param_groups, settings, strict=True):
            group.update(before)
        for tensor, (data, gradient) in zip(tensors, values, strict=True):
            tensor.data, tensor.grad = data, gradient
    made = dict(optimizer.state)
    optimizer.state.clear()
    for kept in made.values():
        if "step" in kept:
            kept["step"] *= 0
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
        elements = {k: v.view(-1) for k, v in values.items() if is_of_elements(v, shard.tensor)}
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
