"""Layers of which some are frozen and others count in buffers: on a rank, and in one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import zeropp
from tests.gloo import small_layers
from tests.gloo.small_layers import BATCH, loss_function, trained_alone
from zeropp.train.parallel_model import ParallelModel

WIDTH = 6
data = partial(small_layers.data, width=WIDTH)
Kind = Callable[..., torch.optim.Optimizer]


class Counting(nn.Module):
    """Holds a buffer that a checkpoint has, and one that it has not; its bias is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.linear.bias.requires_grad_(False)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.get_buffer("seen").add_(1).clone()
        out: Tensor = self.linear(x)
        return out.tanh()


def made() -> list[nn.Module]:
    """Layers, equal on every rank: one is frozen, others have buffers."""
    torch.manual_seed(2)
    layers = [nn.Linear(WIDTH, WIDTH), Counting(), nn.Linear(WIDTH, WIDTH), Counting()]
    layers[2].requires_grad_(False)
    return [layer.double() for layer in [*layers, nn.Linear(WIDTH, WIDTH)]]


def alone(steps: int) -> nn.Module:
    """The layers after some steps in one process."""
    return trained_alone(made(), map(data, range(steps)), partial(torch.optim.AdamW, lr=1e-2))


def parallel(degrees: dict[str, Any]) -> ParallelModel:
    return zeropp.parallelize(
        made(),
        loss_function,
        sample=data(0)[0][:1],
        global_batch=BATCH,
        optimizer=lambda groups: torch.optim.AdamW(groups["all"], lr=1e-2),
        **degrees,
    )


def train(model: ParallelModel, first: int, last: int) -> None:
    for step in range(first, last):
        inputs, targets = data(step)
        model.train_step(inputs[model.rows], targets[model.rows])


def check(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert set(found) == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=0.0, atol=tolerance, check_dtype=False, msg=name
        )


def trained_part(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A state dict without counters, which each data-parallel rank has of its own rows."""
    assert "1.seen" in state
    return {name: value for name, value in state.items() if "seen" not in name}


def grouped(degrees: dict[str, Any], kind: Kind = torch.optim.AdamW) -> ParallelModel:
    """A model whose first layer is an optimizer group of its own, with another learning rate."""
    return zeropp.parallelize(
        made(),
        loss_function,
        sample=data(0)[0][:1],
        global_batch=BATCH,
        group_of=lambda name, _: "first" if name[0] == 0 else "others",
        optimizer=lambda groups: kind(
            [{"params": p, "lr": 0.1 if name == "first" else 0.01} for name, p in groups.items()]
        ),
        **degrees,
    )
