"""Takes over a state dict that is given by name, in the form that users of torch's
``torch.distributed.checkpoint`` expect (``zeropp.engine.checkpoint.State.named``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zeropp.engine.checkpoint import OPTIMIZER, SETTINGS, STEPS, State
from zeropp.engine.part import Part


def load_named(state: State, given: Mapping[str, Any]) -> None:
    """Copy a dict like that of ``State.named``, or of whole tensors, into a state; collective.

    What is given of the optimizer may be less than what the state has. Raises ValueError, the same
    on every rank and before anything is copied, for a name that is missing or that no rank has, and
    for another shape.
    """
    steps = int(given.get(STEPS, state.steps_done))
    kept = dict(given.get(OPTIMIZER, {}))
    settings = kept.pop(SETTINGS, {})
    model = {name: value for name, value in given.items() if name not in (OPTIMIZER, STEPS)}
    offered = {**model, **_named_as(OPTIMIZER, kept)}
    held = {**state.model, **_named_as(OPTIMIZER, state.optimizer)}
    theirs, mine = (_named_as(f"{OPTIMIZER}.{SETTINGS}", s) for s in (settings, state.settings))
    problem = _missing(state, model) or _first_problem(held, offered)
    _raise_together(problem, [*offered, *theirs], [*held, *mine])
    _copy(held, offered)
    state.settings.update((name, settings[name]) for name in state.settings if name in settings)
    state.steps_done.fill_(steps)
    if not kept:  # an optimizer that has not begun stays so
        state.unbegun.clear()


def _named_as(prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{prefix}.{name}": value for name, value in values.items()}


def _missing(state: State, model: Mapping[str, Any]) -> str:
    return next((f"{name}: is missing" for name in state.model if name not in model), "")


def _first_problem(held: Mapping[str, Tensor], offered: Mapping[str, Any]) -> str:
    """The first thing that cannot be copied into what is held, or an empty text."""
    for name, target in held.items():
        why = _problem(target, offered[name]) if name in offered else ""
        if why:
            return f"{name}: {why}"
    return ""


def _problem(target: Tensor, value: object) -> str:
    if not isinstance(value, Tensor):
        return f"is of type {type(value).__name__}, which is no tensor"
    if value.shape != target.shape:
        return f"has shape {tuple(value.shape)}, the model {tuple(target.shape)}"
    if isinstance(target, Part) and isinstance(value, Part) and not target.is_cut_as(value):
        return "is cut as on another rank (load it with torch.distributed.checkpoint)"
    return ""


@torch.no_grad()
def _copy(held: Mapping[str, Tensor], offered: Mapping[str, Tensor]) -> None:
    for name, target in held.items():
        if name not in offered:
            continue
        if isinstance(target, Part):
            target.load(offered[name])
        elif target is not offered[name]:
            target.copy_(offered[name])


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
