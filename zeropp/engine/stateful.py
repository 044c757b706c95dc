"""A rank's state as one state dict, in the form that users of torch.distributed.checkpoint expect.

Parameters and buffers have the names of the unsharded model at the top; ``optimizer`` and
``steps_done`` stand beside them, and no layer can have such a name, because layers are numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zeropp.engine.checkpoint import State
from zeropp.engine.part import Part

_OPTIMIZER, _STEPS = "optimizer", "steps_done"


def named_state(state: State) -> dict[str, Any]:
    """A state as one dict."""
    optimizer = {_OPTIMIZER: state.optimizer} if state.optimizer else {}
    return {**state.model, **optimizer, _STEPS: state.steps_done}


def load_named(state: State, given: Mapping[str, Any]) -> None:
    """Copy a dict like that of ``named_state``, or of whole tensors, into a state; collective.

    What is given of the optimizer may be less than what the state has. Raises ValueError, the same
    on every rank, for a name that is missing or that no rank has, and for another shape.
    """
    optimizer: Mapping[str, Tensor] = given.get(_OPTIMIZER, {})
    model = {name: value for name, value in given.items() if name not in (_OPTIMIZER, _STEPS)}
    problems = [_missing(state, model), *_copied(state.model, model, "")]
    problems += _copied(state.optimizer, optimizer, f"{_OPTIMIZER}.")
    if _STEPS in given:
        state.steps_done.fill_(int(given[_STEPS]))
    names = [*model, *(f"{_OPTIMIZER}.{name}" for name in optimizer)]
    known = [*state.model, *(f"{_OPTIMIZER}.{name}" for name in state.optimizer)]
    _raise_together(next(filter(None, problems), ""), names, known)


def _missing(state: State, model: Mapping[str, Tensor]) -> str:
    return next((f"{name}: is missing" for name in state.model if name not in model), "")


@torch.no_grad()
def _copied(held: Mapping[str, Tensor], given: Mapping[str, Tensor], prefix: str) -> list[str]:
    """Copy what is given of what is held; the problems that came up."""
    problems = []
    for name, target in held.items():
        if name not in given:
            continue
        try:
            if isinstance(target, Part):
                target.load(given[name])
            elif target is not given[name]:
                target.copy_(given[name])
        except (ValueError, RuntimeError) as error:
            problems.append(f"{prefix}{name}: {error}")
    return problems


def _raise_together(problem: str, names: list[str], known: list[str]) -> None:
    everything: list[tuple[str, list[str], list[str]]] = [("", [], [])] * dist.get_world_size()
    dist.all_gather_object(everything, (problem, names, known))
    held = {name for _, _, theirs in everything for name in theirs}
    for rank, (found, given, _) in enumerate(everything):
        unknown = next((name for name in given if name not in held), None)
        if unknown is not None:
            found = found or f"{unknown}: the model has nothing of that name"
        if found:
            raise ValueError(f"load_state_dict: {found} (on rank {rank})")
