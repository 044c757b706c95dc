"""What faults are made of: where a rank stands, and what is changed of its trainer.

A fault is a context manager; while it is open, trainers are built and run with it. It gives what
has still to be done to a trainer after it was built.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zeropp.engine.update.update_rules import build_optimizer
from zeropp.schedule.plan import Plan
from zeropp.types.training import OptimizerConfig

_BUILDERS = (
    "zeropp.engine.update.update_rules",
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
Hook = Callable[[torch.optim.Optimizer, int], None]  # beside a step, which is counted from 1
Feed = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # inputs, targets


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


def unchanged(trainer: Any) -> Any:
    return trainer


def _building(make: Callable[[Place, OptimizerConfig, Any], torch.optim.Optimizer]) -> Fault:
    """Every contender builds its optimizer otherwise."""

    @contextmanager
    def fault(place: Place) -> Iterator[Prepare]:
        def build(parameters: Any, asked: OptimizerConfig) -> torch.optim.Optimizer:
            return make(place, asked, parameters)

        with ExitStack() as stack:
            for module in _BUILDERS:
                stack.enter_context(mock.patch(f"{module}.build_optimizer", build))
            yield unchanged

    return fault


def with_settings(**changes: Callable[[OptimizerConfig], float]) -> Fault:
    """The optimizer has other settings than those that were asked for."""

    def make(place: Place, asked: OptimizerConfig, parameters: Any) -> torch.optim.Optimizer:
        other: dict[str, Any] = {name: change(asked) for name, change in changes.items()}
        return build_optimizer(parameters, replace(asked, **other))

    return _building(make)


def beside_steps(
    hook_of: Callable[[Place, OptimizerConfig], Hook], *, after: bool = False
) -> Fault:
    """Something is done to the optimizer of this rank right before, or after, each of its steps."""

    def make(place: Place, asked: OptimizerConfig, parameters: Any) -> torch.optim.Optimizer:
        optimizer, steps, hook = build_optimizer(parameters, asked), [0], hook_of(place, asked)

        def run(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            steps[0] += 1
            hook(optimizer, steps[0])

        if after:
            optimizer.register_step_post_hook(run)
        else:
            optimizer.register_step_pre_hook(run)
        return optimizer

    return _building(make)


def editing(edit: Callable[[Place], Edit]) -> Fault:
    """Edit this rank's gradients right before its optimizer applies them."""

    def hook_of(place: Place, asked: OptimizerConfig) -> Hook:
        apply = edit(place)
        return lambda optimizer, step: apply(gradients_of(optimizer), step)

    return beside_steps(hook_of)


def scaled_part(begin: float, end: float, factor: float) -> Fault:
    """Scale a part of the gradients: from ``begin`` to ``end`` of all elements on this rank."""

    def apply(gradients: list[Tensor], step: int) -> None:
        for piece in pieces(gradients, begin, end):
            piece *= factor

    return editing(lambda place: apply)


def pieces(tensors: list[Tensor], begin: float, end: float) -> Iterator[Tensor]:
    """Views of the elements from ``begin`` to ``end`` of all that this rank holds, as shares."""
    total, start = sum(each.numel() for each in tensors), 0
    for each in tensors:
        first, last = (max(int(share * total) - start, 0) for share in (begin, end))
        yield each.view(-1)[first:last]
        start += each.numel()


def prepared(change: Callable[[Place, Any], None]) -> Fault:
    """Something is changed in a trainer that was built."""

    @contextmanager
    def fault(place: Place) -> Iterator[Prepare]:
        def prepare(trainer: Any) -> Any:
            change(place, trainer)
            return trainer

        yield prepare

    return fault


def feeding(make: Callable[[Place], Feed]) -> Fault:
    """What a rank is given is changed."""

    def change(place: Place, trainer: Any) -> None:
        step, feed = trainer.step, make(place)
        trainer.step = lambda inputs, targets: step(*feed(inputs, targets))

    return prepared(change)


def patched(owner: Any, name: str, make: Callable[[Place, Any], Any]) -> Fault:
    """An attribute is replaced by what ``make`` makes of the place and of the original."""

    @contextmanager
    def fault(place: Place) -> Iterator[Prepare]:
        with mock.patch.object(owner, name, make(place, getattr(owner, name))):
            yield unchanged

    return fault
