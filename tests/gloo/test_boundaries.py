"""Boundaries between stages without a gradient, or with layers that work in place."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from tests.gloo.differences import largest
from tests.gloo.small_layers import BATCH, WIDTH, Kind, built, data, linear, seeded, trained_alone
from tests.gloo.world import World


class Tokens(nn.Module):
    """Integers in, integers out: nothing before it can have a gradient."""

    def forward(self, tokens: Tensor) -> Tensor:
        return (tokens + 1) % 5


class Embed(nn.Module):
    """An embedding behind it, and a projection."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table(tokens)  # type: ignore[no-any-return]


class Forgetful(nn.Module):
    """A layer whose output does not depend on its input."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.full((WIDTH,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.value.expand(x.shape)


def train_over(kinds: list[Kind], integers: bool, pp: int) -> dict[str, float]:
    """How far this rank's parameters are, after two steps, from those of one process."""
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randint(5, (BATCH,), generator=generator) if integers else data()[0]
    batches = [(inputs, data()[1])] * 2
    expected = trained_alone(seeded(kinds), batches, partial(torch.optim.SGD, lr=0.1))
    model = built(seeded(kinds), sample=inputs[:1], pp=pp, weights=[1.0] * len(kinds))
    for batch in batches:
        model.train_step(*batch)
    alone = dict(expected.named_parameters())
    return {
        name: float((value.double() - alone[name]).abs().max())
        for name, value in model.full_parameters()
    }


def in_place() -> nn.Module:
    """Changes what it is given."""
    return nn.ReLU(inplace=True)


IN_PLACE = [linear, in_place, linear, in_place]
INTEGERS = [Tokens, Tokens, Embed, linear]
FORGETFUL = [linear, linear, Forgetful, linear]


@pytest.mark.parametrize(
    ("kinds", "integers"), [(INTEGERS, True), (FORGETFUL, False), (IN_PLACE, False)]
)
@pytest.mark.parametrize("pp", [2, 4])
def test_boundaries_with_no_gradient_or_work_in_place(
    world: World, kinds: list[Kind], integers: bool, pp: int
) -> None:
    found = world.run(train_over, kinds, integers, pp, size=pp)
    errors = [error for rank in found for error in rank.values()]
    assert largest(errors) < 1e-6  # parameters come as fp32
