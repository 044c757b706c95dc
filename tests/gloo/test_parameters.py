"""Parameters that need care: tied, or in other classes of linear layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

import zeropp
from tests.gloo.layers import WIDTH, Kind, linear
from tests.gloo.models import apart, built, data, seeded, steps, trained_alone
from tests.gloo.world import World, on_ranks
from zeropp.train.parallel_model import ParallelModel


class Scaled(nn.Linear):
    """A linear layer that computes as nn.Linear does."""


class Own(nn.Linear):
    """A linear layer with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * 2.0, self.bias)


def layers_of(kind: Kind = linear) -> list[nn.Module]:
    """Layers, equal on every rank."""
    return seeded([linear, *[kind] * 4, linear])


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.5)


def parallel(layers: list[nn.Module], **more: Any) -> ParallelModel:
    return built(layers, optimizer=lambda groups: optimizer(groups["all"]), **more)


def error_after_steps(model: ParallelModel, layers: list[nn.Module]) -> float:
    """The difference of this rank's parameters from those of one process that trains the layers."""
    expected = trained_alone(layers, map(data, range(2)), optimizer)
    steps(model, 0, 1)
    return apart(
        dict(model.full_parameters()), dict(expected.named_parameters(remove_duplicate=False))
    )


KINDS: dict[str, tuple[Kind, bool]] = {  # whether weight gradients are delayed
    "plain": (linear, True),
    "Conv1D": (lambda: Conv1D(WIDTH, WIDTH), True),
    "subclass": (lambda: Scaled(WIDTH, WIDTH), True),
    "own forward": (lambda: Own(WIDTH, WIDTH), False),
}


@pytest.mark.parametrize("name", KINDS)
@on_ranks(2)
def test_classes_of_linear_layers(name: str) -> None:
    kind, is_delayed = KINDS[name]
    with parallel(layers_of(kind), pp=2, chunks=2) as model:
        assert error_after_steps(model, layers_of(kind)) < 1e-6
        assert any(flat.deferred for flat in model.engine.flats) == is_delayed


@pytest.mark.parametrize("degrees", [{"shard": 2}, {"chunks": 2, "shard": 2}], ids=str)
@on_ranks(4)
def test_copies_of_a_tied_weight_are_in_one_optimizer_group(degrees: dict[str, Any]) -> None:
    """Where each layer has its own learning rate."""
    rates = {"first": 0.1, "others": 0.01}
    with built(
        layers_of(), tied=((5, "weight"), (0, "weight")), pp=2, **degrees,
        group_of=lambda name, _: "first" if name[0] == 0 else "others",
        optimizer=lambda groups: torch.optim.AdamW(
            [{"params": groups[name], "lr": rate} for name, rate in rates.items()]
        ),
    ) as model:  # fmt: skip
        steps(model, 0, 1)
        whole = model.full_state_dict()
        assert bool(whole) == (dist.get_rank() == 0)
        assert not whole or torch.equal(whole["0.weight"], whole["5.weight"])


@pytest.mark.parametrize("degrees", [{"shard": 2}, {"pp": 2}, {"pp": 2, "chunks": 2}], ids=str)
@on_ranks(2)
def test_tied_parameters_begin_alike_in_every_order_and_topology(degrees: dict[str, Any]) -> None:
    names = ((0, "weight"), (5, "weight"))
    expected = layers_of()[0].get_parameter("weight").float()
    for tied in (names, names[::-1]):
        with parallel(layers_of(), tied=tied, **degrees) as model:
            values = model.full_state_dict()
        assert bool(values) == (dist.get_rank() == 0)
        if values:
            torch.testing.assert_close(values["0.weight"], expected)
            assert torch.equal(values["5.weight"], values["0.weight"])


@pytest.mark.parametrize("size", [1, 2, 3])
@on_ranks(lambda size: size)
def test_ties_of_any_two_layers(size: int) -> None:
    """At the ends or inside, in one chunk and in two."""
    for first, second, chunks in ((0, 5, 1), (0, 5, 2), (1, 4, 1), (1, 4, 2), (1, 2, 2)):
        together: list[Any] = layers_of()
        together[second].weight = together[first].weight
        tied = (first, "weight"), (second, "weight")
        with parallel(layers_of(), tied=tied, pp=size, chunks=chunks) as model:
            assert error_after_steps(model, together) < 1e-6


class Normed(nn.Module):
    """A residual layer with a norm, which notes the types it computes in."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        with torch.no_grad():
            self.norm.weight.add_(2.0**-12)  # bf16 has no such number
        self.seen: set[tuple[Any, ...]] = set()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(x)
        if not x.is_meta:
            dtypes = (one.dtype for one in (x, y, self.linear.weight, self.norm.weight))
            self.seen.add((*dtypes, float(self.norm.weight.detach()[0])))
        return x + self.linear(y)  # type: ignore[no-any-return]


def normed(degrees: dict[str, Any], kinds: tuple[type[nn.Module], ...]) -> tuple[Any, Any]:
    """What layers have seen in a first step in bf16, and its gradients."""
    torch.manual_seed(4)
    layers = [Normed() for _ in range(4)]
    x, y = (part.float() for part in data())
    given: dict[str, Any] = {"sample": x[:1], "precision": "bf16", "fp32_modules": kinds}
    with built(layers, optimizer=zeropp.OptimizerConfig(), **given, **degrees) as model:
        model.train_step(x[model.rows], y[model.rows])
        seen = set().union(*(layer.seen for layer in layers))
        return seen, dict(model.gradients())


def test_norms_compute_in_fp32_where_asked(world: World) -> None:
    (wide, alone), (narrow, rounded) = (
        world.run(normed, {}, kinds, size=1)[0] for kinds in ((nn.LayerNorm,), ())
    )
    short = torch.bfloat16
    assert wide == {(short, short, short, torch.float32, 1 + 2.0**-12)}
    assert narrow == {(short, short, short, short, 1.0)}
    assert 0 < apart(rounded, alone) < 0.1
    degrees = {"pp": 2, "shard": 2, "recompute": "full"}
    for seen, gradients in world.run(normed, degrees, (nn.LayerNorm,), size=4):
        assert seen == wide
        for name, one in gradients.items():
            torch.testing.assert_close(one, alone[name], rtol=2e-2, atol=1e-3)


@on_ranks(2)
def test_frozen_norms_in_bf16_compute_in_fp32() -> None:
    layers = [Normed().bfloat16() for _ in range(2)]
    for layer in layers:
        layer.norm.requires_grad_(False)
    x, y = (part.float() for part in data())
    given: dict[str, Any] = {"precision": "bf16", "fp32_modules": (nn.LayerNorm,)}
    with built(layers, sample=x[:1], shard=2, **given) as model:
        assert float(model.train_step(x[model.rows], y[model.rows]).loss) > 0
    assert [seen[3] for layer in layers for seen in layer.seen] == [torch.float32] * 2
