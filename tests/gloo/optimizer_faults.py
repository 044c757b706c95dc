"""Faults in what an optimizer does with right gradients: other settings, or settings misapplied."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from tests.gloo.gate_place import (
    Fault,
    Place,
    Prepare,
    building,
    gradients_of,
    local,
    parameters_of,
)
from zeropp.engine.update_rules import build_optimizer
from zeropp.types.training import OptimizerConfig

Hook = Callable[[torch.optim.Optimizer, int], None]  # before a step, which is counted from 1


def with_settings(**changes: Callable[[OptimizerConfig], float]) -> Fault:
    """The optimizer has other settings than those that were asked for."""

    @contextmanager
    def fault(place: Place) -> Iterator[Prepare]:
        del place

        def build(parameters: Any, asked: OptimizerConfig) -> torch.optim.Optimizer:
            other: dict[str, Any] = {name: change(asked) for name, change in changes.items()}
            return build_optimizer(parameters, replace(asked, **other))

        with building(build):
            yield lambda trainer: trainer

    return fault


def before_steps(make: Callable[[OptimizerConfig], Hook]) -> Fault:
    """Something is done to the optimizer of this rank right before each of its steps."""

    @contextmanager
    def fault(place: Place) -> Iterator[Prepare]:
        del place

        def build(parameters: Any, asked: OptimizerConfig) -> torch.optim.Optimizer:
            optimizer, steps, hook = build_optimizer(parameters, asked), [0], make(asked)

            def before(optimizer: torch.optim.Optimizer, *_: Any) -> None:
                steps[0] += 1
                hook(optimizer, steps[0])

            optimizer.register_step_pre_hook(before)
            return optimizer

        with building(build):
            yield lambda trainer: trainer

    return fault


def _one_step_ahead(asked: OptimizerConfig) -> Hook:
    """From the second step on, Adam's bias correction is that of the step after."""
    del asked

    def hook(optimizer: torch.optim.Optimizer, step: int) -> None:
        if step == 2:
            for state in optimizer.state.values():
                state["step"] = state["step"] + 1

    return hook


def _clipped_per_rank(asked: OptimizerConfig) -> Hook:
    """Every rank clips to the norm of the gradients that it holds."""

    def hook(optimizer: torch.optim.Optimizer, step: int) -> None:
        del step
        held = gradients_of(optimizer)
        norm = math.sqrt(sum(float(each.double().square().sum()) for each in held))
        for gradient in held:
            gradient.mul_(asked.clip_norm / norm)

    return hook


def _twice_as_large(asked: OptimizerConfig) -> Hook:
    """Gradients are clipped to twice the norm, which in the gate's first step is no clipping."""
    del asked

    def hook(optimizer: torch.optim.Optimizer, step: int) -> None:
        del step
        for gradient in gradients_of(optimizer):
            gradient.mul_(2)

    return hook


def _small_ones_keep(asked: OptimizerConfig) -> Hook:
    """A twentieth of this rank's elements, as many as norms and biases are, have no weight
    decay."""

    def hook(optimizer: torch.optim.Optimizer, step: int) -> None:
        del step
        for piece in _pieces(parameters_of(optimizer), 0.5, 0.55):
            piece.div_(1 - asked.lr * asked.weight_decay)

    return hook


def _pieces(parameters: list[nn.Parameter], begin: float, end: float) -> Iterator[Tensor]:
    """Views of the elements from ``begin`` to ``end`` of all that this rank holds, as shares."""
    held = [local(parameter.detach()).view(-1) for parameter in parameters]
    total, start = sum(each.numel() for each in held), 0
    for each in held:
        first, last = (max(int(share * total) - start, 0) for share in (begin, end))
        yield each[first:last]
        start += each.numel()


OPTIMIZER_FAULTS: dict[str, Fault] = {
    "learning rate 1 % low": with_settings(lr=lambda asked: 0.99 * asked.lr),
    "learning rate a fifth low": with_settings(lr=lambda asked: 0.8 * asked.lr),
    "betas swapped": with_settings(
        beta1=lambda asked: asked.beta2, beta2=lambda asked: asked.beta1
    ),
    "another epsilon": with_settings(eps=lambda asked: asked.eps / 10),
    "bias correction one step ahead": before_steps(_one_step_ahead),
    "no weight decay": with_settings(weight_decay=lambda asked: 0.0),
    "no weight decay of a twentieth": before_steps(_small_ones_keep),
    "clipped per rank": before_steps(_clipped_per_rank),
    "not clipped": before_steps(_twice_as_large),
}
