"""Small models in fp64, and what ``parallelize`` makes or says of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import zeropp
from zeropp.train.parallel_model import ParallelModel

WIDTH = 8
BATCH = 12
Kind = Callable[[], nn.Module]


def loss_function(output: Tensor, target: Tensor) -> Tensor:
    """Mean square error in the type of the target, as torch 2.11 does not take two types."""
    return F.mse_loss(output.to(target.dtype), target)


def data(step: int = 0, width: int = WIDTH) -> tuple[Tensor, Tensor]:
    """Inputs and targets of a step: a global batch of vectors, in fp64."""
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(2, BATCH, width, generator=generator, dtype=torch.float64)
    return x, y


def seeded(kinds: list[Kind]) -> list[nn.Module]:
    """Layers of these kinds in fp64, equal on every rank."""
    torch.manual_seed(3)
    return [kind().double() for kind in kinds]


class Scale(nn.Module):
    """A layer whose only parameter is one number."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def linear() -> nn.Module:
    """A plain layer."""
    return nn.Linear(WIDTH, WIDTH)


def built(layers: list[Any], **more: Any) -> ParallelModel:
    """The layers in parallel, with plain SGD and one row per microbatch."""
    arguments: dict[str, Any] = {
        "sample": data()[0][:1],
        "global_batch": BATCH,
        "optimizer": zeropp.OptimizerConfig("sgd", lr=0.1),
    }
    arguments |= more
    return zeropp.parallelize(layers, arguments.pop("loss_fn", loss_function), **arguments)


def trained_alone(
    layers: Sequence[nn.Module],
    batches: Iterable[tuple[Tensor, Tensor]],
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
) -> nn.ModuleList:
    """Copies of the layers after a step with each batch in one process, row by row; the gradients
    of the last step are in them."""
    model = nn.ModuleList(copy.deepcopy(list(layers)))
    stepper = optimizer([p for p in model.parameters() if p.requires_grad])
    for inputs, targets in batches:
        stepper.zero_grad()
        for x, y in zip(inputs[:, None], targets[:, None], strict=True):
            for layer in model:
                x = layer(x)
            (loss_function(x, y) / BATCH).backward()  # type: ignore[no-untyped-call]
        stepper.step()
    return model


def error_of(make: Callable[[], object]) -> str:
    """What a call raises, as ``Kind: message``; empty where it raises nothing."""
    try:
        make()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def step(model: ParallelModel, number: int = 0) -> float:
    """Train one step; the loss."""
    inputs, targets = data(number)
    return float(model.train_step(inputs[model.rows], targets[model.rows]).loss)
