"""Takes over a state dict that is given by name, in the form that users of torch's
``torch.distributed.checkpoint`` expect (``zeropp.engine.checkpoint.State.named``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zeropp.engine.checkpoint import OPTIMIZER, SETTINGS, STEPS, State
from zeropp.engine.flat_layout import Name, Slot
from zeropp.engine.kept import BEGUN, Kept
from zeropp.engine.part import Part
from zeropp.engine.together import together


def load_named(state: State, given: Mapping[str, Any]) -> None:
    """Copy a dict like that of ``State.named``, or of whole tensors, into a state; collective.

    Optimizer state may be missing from it, and then stays as it is. Raises ValueError, the same
    on every rank and before anything is copied, for a name that is missing or that no rank has, and
    for another shape.
    """
    offer = together(lambda: _Offer.of(given, state))
    held = {**state.model, **_named_as(OPTIMIZER, state.optimizer)}
    mine = _named_as(f"{OPTIMIZER}.{SETTINGS}", state.settings)
    theirs = _named_as(f"{OPTIMIZER}.{SETTINGS}", offer.settings)
    problem = together(lambda: _missing(state, offer) or _first_problem(held, offer.tensors))
    _raise_together(problem, [*offer.tensors, *theirs], [*held, *mine])
    together(lambda: _copy(held, offer.tensors))
    known = {name: offer.settings[name] for name in state.settings if name in offer.settings}
    state.settings.update(known)
    state.steps_done.fill_(offer.steps)
    _begin_where_unsaid(state)


def _begin_where_unsaid(state: State) -> None:
    """Let the optimizer's state of every parameter count that is not zeros everywhere; collective.

    Where a parameter has not begun, its state is zeros. So other values without ``begun`` come from
    a checkpoint of before that number, which ``torch.distributed.checkpoint`` has read in part.
    """
    slots = [(kept, slot) for _, kept in state.kept for slot in kept.numbers]
    mine = together(lambda: {slot.names for kept, slot in slots if _has_values(kept, slot)})
    of_ranks: list[set[tuple[Name, ...]]] = [set()] * dist.get_world_size()
    dist.all_gather_object(of_ranks, mine)
    begun = set[tuple[Name, ...]]().union(*of_ranks)
    for kept, slot in slots:
        if slot.names in begun:
            kept.numbers[slot][BEGUN].fill_(1)


def _has_values(kept: Kept, slot: Slot) -> bool:
    """Whether what this rank has of a parameter's optimizer state, with ``begun``, is not zeros."""
    inside = slot.stretch.meet(kept.one.stretch).inside(kept.one.stretch)
    elements = (value[inside] for value in kept.elements.values())
    return any(bool(value.any()) for value in chain(kept.numbers[slot].values(), elements))


@dataclass(frozen=True)
class _Offer:
    """What a state dict has: tensors by name, settings of optimizer groups, steps done."""

    tensors: Mapping[str, Any]
    settings: Mapping[str, Any]
    steps: int

    @classmethod
    def of(cls, given: Mapping[str, Any], state: State) -> _Offer:
        """The offer in a state dict; if the dict has no number of steps, ``state``'s is taken."""
        kept = dict(given.get(OPTIMIZER, {}))
        settings = kept.pop(SETTINGS, {})
        for name in [*kept]:  # state that is given without ``begun`` counts
            kept.setdefault(f"{name.rpartition('.')[0]}.{BEGUN}", torch.tensor(1))
        tensors = {name: value for name, value in given.items() if name not in (OPTIMIZER, STEPS)}
        steps = int(given.get(STEPS, state.steps_done))
        return cls({**tensors, **_named_as(OPTIMIZER, kept)}, settings, steps)


def _named_as(prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{prefix}.{name}": value for name, value in values.items()}


def _missing(state: State, offer: _Offer) -> str:
    return next((f"{name}: is missing" for name in state.model if name not in offer.tensors), "")


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
