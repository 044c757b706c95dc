"""What faults are made of: where a rank stands, and what is changed of its trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zeropp.engine.update_rules import build_optimizer
from zeropp.schedule.plan import Plan

_BUILDERS = (
    "zeropp.engine.optimizer",
    "baselines.torch_pp.trainer",
    "baselines.fsdp.trainer",
    "baselines.deepspeed_3d.trainer",
    "baselines.megatron_core.trainer",
)


@dataclass(frozen=True)
class Place:
    """Where this rank stands, and in which plan."""

    plan: Plan
    dp_index: int
    pp: int
    tp: int


Prepare = Callable[[Any], Any]  # a trainer, made faulty
Fault = Callable[[Place], AbstractContextManager[Prepare]]
Edit = Callable[[list[Tensor], int], None]  # gradients about to be applied, step from 1
Feed = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # inputs, targets


@contextmanager
def building(build: Callable[..., torch.optim.Optimizer]) -> Iterator[None]:
    """While this is open, every contender builds its optimizer with ``build``."""
    with ExitStack() as stack:
        for module in _BUILDERS:
            stack.enter_context(mock.patch(f"{module}.build_optimizer", build))
        yield


def parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """The parameters that have a gradient."""
    every = [p for group in optimizer.param_groups for p in group["params"]]
    return [parameter for parameter in every if parameter.grad is not None]


def gradients_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """This rank's gradients, as they are about to be applied."""
    return [local(p.grad) for p in parameters_of(optimizer) if p.grad is not None]


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def editing(edit: Callable[[Place], Edit]) -> Fault:
    """Edit this rank's gradients right before its optimizer applies them."""

    @contextmanager
    def fault(place: Place) -> Iterator[Prepare]:
        apply, steps = edit(place), [0]

        def before(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            steps[0] += 1
            apply(gradients_of(optimizer), steps[0])

        def build(*arguments: Any) -> torch.optim.Optimizer:
            optimizer = build_optimizer(*arguments)
            optimizer.register_step_pre_hook(before)
            return optimizer

        with building(build):
            yield lambda trainer: trainer

    return fault


def scaled_part(begin: float, end: float, factor: float) -> Callable[[Place], Edit]:
    """Scale a part of the gradients: from ``begin`` to ``end`` of all elements on this rank."""

    def apply(gradients: list[Tensor], step: int) -> None:
        del step
        total = sum(gradient.numel() for gradient in gradients)
        first, last, start = int(begin * total), int(end * total), 0
        for gradient in gradients:
            piece = slice(max(first - start, 0), max(last - start, 0))
            gradient.view(-1)[piece] *= factor
            start += gradient.numel()

    return lambda place: apply


def feeding(change: Feed) -> Prepare:
    """A trainer whose batches are changed."""

    def prepare(trainer: Any) -> Any:
        step = trainer.step
        trainer.step = lambda inputs, targets: step(*change(inputs, targets))
        return trainer

    return prepare
