"""``zeropp.check`` finds what differs from one process, and nothing where nothing does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeropp
from tests.gloo.world import World

WIDTH, ROWS = 8, 8


class Shift(nn.Module):
    """Adds the token before, times a weight that begins at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight * x.roll(1, 1)


class Teller(nn.Linear):
    """Tells a ``Listener`` a number beside its output."""

    told: Any = None

    def forward(self, x: Tensor) -> Tensor:
        Teller.told = x.detach().mean() if not x.is_meta else None
        return super().forward(x)


class Listener(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1.0 if Teller.told is None else 1.0 + Teller.told)


def found(kind: str, degrees: dict[str, int]) -> str:
    torch.manual_seed(0)
    inner = [Teller(WIDTH, WIDTH), Listener(WIDTH, WIDTH)] if kind == "told" else [Shift()]
    inner = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2))] if kind == "right" else inner
    layers = [nn.Linear(WIDTH, WIDTH), *inner, nn.Linear(WIDTH, WIDTH)]
    batches = [(torch.randn(ROWS, 4, WIDTH), torch.randn(ROWS, 4, WIDTH)) for _ in range(2)]
    try:
        checked = zeropp.check(
            layers, nn.functional.mse_loss, batches, sample=batches[0][0][:2],
            global_batch=ROWS, **degrees,
        )  # fmt: skip
    except zeropp.DifferenceError as error:
        return str(error)
    return f"{checked.steps} steps"


@pytest.mark.parametrize(
    ("kind", "degrees", "words"),
    [
        ("right", {"pp": 2}, "2 steps"),
        ("right", {"shard": 2}, "2 steps"),
        ("slice", {"context": 2}, "layers[1]: gives another output"),
        ("told", {"pp": 2, "unit": 2}, "layers[2]: gives another output"),
    ],
)
def test_what_differs_is_named(
    world: World, kind: str, degrees: dict[str, int], words: str
) -> None:
    for said in world.run(found, kind, degrees, size=2):
        assert words in said
