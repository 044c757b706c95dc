"""Parameters that need care: tied, or in other classes of linear layers."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

import zeropp
from tests.gloo import small_layers
from tests.gloo.differences import largest
from tests.gloo.small_layers import BATCH, loss_function, trained_alone
from tests.gloo.world import World
from zeropp.train.parallel_model import ParallelModel

WIDTH = 6
data = partial(small_layers.data, width=WIDTH)


class Scaled(nn.Linear):
    """A linear layer that computes as nn.Linear does."""


class Own(nn.Linear):
    """A linear layer with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * 2.0, self.bias)


def layers_of(kind: Callable[[], nn.Module]) -> list[nn.Module]:
    """Layers, equal on every rank."""
    torch.manual_seed(4)
    made = [nn.Linear(WIDTH, WIDTH), *(kind() for _ in range(4)), nn.Linear(WIDTH, WIDTH)]
    return [layer.double() for layer in made]


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.5)


def alone(layers: list[nn.Module], steps: int) -> nn.Module:
    """The layers after some steps in one process."""
    return trained_alone(layers, map(data, range(steps)), optimizer)


def parallel(layers: list[nn.Module], **more: Any) -> ParallelModel:
    return zeropp.parallelize(
        layers, loss_function, sample=data(0)[0][:1], global_batch=BATCH,
        optimizer=lambda groups: optimizer(groups["all"]), **more,
    )  # fmt: skip


def step(model: ParallelModel, number: int) -> None:
    inputs, targets = data(number)
    model.train_step(inputs[model.rows], targets[model.rows])


def worst(model: ParallelModel, expected: nn.Module) -> float:
    """Largest difference of this rank's parameters from one process's."""
    theirs = dict(expected.named_parameters())
    found = dict(model.full_parameters())
    assert found
    return largest(
        float((value - theirs[name].float()).abs().max()) for name, value in found.items()
    )


def train_kinds() -> dict[str, tuple[float, bool, int]]:
    """For kinds of linear layers: error, whether weight gradients are delayed, warnings."""
    kinds: dict[str, Callable[[], nn.Module]] = {
        "plain": lambda: nn.Linear(WIDTH, WIDTH),
        "Conv1D": lambda: Conv1D(WIDTH, WIDTH),
        "subclass": lambda: Scaled(WIDTH, WIDTH),
        "own forward": lambda: Own(WIDTH, WIDTH),
    }
    found = {}
    for name, kind in kinds.items():
        layers = layers_of(kind)
        expected = alone(layers, 2)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            model = parallel(layers, pp=2, chunks=2)
        with model:
            for number in range(2):
                step(model, number)
            deferred = any(flat.deferred for flat in model.engine.flats)
            told = sum("its forward is not that of nn.Linear" in str(w.message) for w in warned)
            found[name] = worst(model, expected), deferred, told
    return found


def test_classes_of_linear_layers(world: World) -> None:
    for found in world.run(train_kinds, size=2):
        assert largest(error for error, _, _ in found.values()) < 1e-6
        assert {name: put_off for name, (_, put_off, _) in found.items()} == {
            "plain": True, "Conv1D": True, "subclass": True, "own forward": False
        }  # fmt: skip
        assert [told for _, _, told in found.values()] == [0, 0, 0, 1]


def train_tied_in_groups() -> list[float]:
    """How far the copies of a tied weight are apart, where each layer has its own learning rate."""
    found = []
    cases: list[dict[str, Any]] = [{"shard": 2}, {"chunks": 2, "shard": 2}]
    for degrees in cases:
        model = zeropp.parallelize(
            layers_of(lambda: nn.Linear(WIDTH, WIDTH)), loss_function, sample=data(0)[0][:1],
            global_batch=BATCH, tied=((5, "weight"), (0, "weight")), pp=2, **degrees,
            group_of=lambda name, _: "first" if name[0] == 0 else "others",
            optimizer=lambda groups: torch.optim.AdamW([
                {"params": groups["first"], "lr": 0.1}, {"params": groups["others"], "lr": 0.01}
            ]),
        )  # fmt: skip
        with model:
            for number in range(2):
                step(model, number)
            whole = model.full_state_dict()
            if whole:
                found.append(float((whole["0.weight"] - whole["5.weight"]).abs().max()))
    return found


def test_copies_of_a_tied_weight_are_in_one_optimizer_group(world: World) -> None:
    first, *_ = world.run(train_tied_in_groups, size=4)
    assert first == [0.0, 0.0]


def tied_values() -> list[dict[str, Tensor]]:
    """Start values of two tied parameters, in either order, in several topologies."""
    found = []
    names = ((0, "weight"), (5, "weight"))
    topologies: tuple[dict[str, Any], ...] = ({}, {"pp": 2}, {"pp": 2, "chunks": 2})
    for degrees in topologies:
        size = degrees.get("pp", 1)
        rest = {"shard": 2 // size}
        for tied in (names, names[::-1]):
            layers = layers_of(lambda: nn.Linear(WIDTH, WIDTH))
            with parallel(layers, tied=tied, **degrees, **rest) as model:
                found.append(model.full_state_dict())
    return found


def test_tied_parameters_begin_alike_in_every_order_and_topology(world: World) -> None:
    first, _ = world.run(tied_values, size=2)
    expected = layers_of(lambda: nn.Linear(WIDTH, WIDTH))[0].weight
    assert len(first) == 6
    for values in first:
        torch.testing.assert_close(values["0.weight"], expected.float())
        assert torch.equal(values["5.weight"], values["0.weight"])


def train_tied(size: int) -> list[float]:
    """Distances from one process after training with a tie of two layers, at the ends or inside,
    in one chunk and in two."""
    found = []
    for first, second, chunks in ((0, 5, 1), (0, 5, 2), (1, 4, 1), (1, 4, 2), (1, 2, 2)):
        layers: list[Any] = layers_of(lambda: nn.Linear(WIDTH, WIDTH))
        together = copy.deepcopy(layers)
        together[second].weight = together[first].weight
        expected = alone(together, 2)
        tied = (first, "weight"), (second, "weight")
        with parallel(layers, tied=tied, pp=size, chunks=chunks) as model:
            for number in range(2):
                step(model, number)
            found.append(worst(model, expected))
    return found


@pytest.mark.parametrize("size", [1, 2, 3])
def test_ties_of_any_two_layers(world: World, size: int) -> None:
    found = world.run(train_tied, size, size=size)
    assert all(len(errors) == 5 for errors in found)
    assert largest(error for errors in found for error in errors) < 1e-6


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
    x, y = (part.float() for part in data(0))
    with zeropp.parallelize(
        layers, loss_function, sample=x[:1], global_batch=BATCH, precision="bf16",
        fp32_modules=kinds, **degrees,
    ) as model:  # fmt: skip
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
    apart = [float((rounded[name] - one).abs().max()) for name, one in alone.items()]
    assert 0 < largest(apart) < 0.1
    degrees = {"pp": 2, "shard": 2, "recompute": "full"}
    for seen, gradients in world.run(normed, degrees, (nn.LayerNorm,), size=4):
        assert seen == wide
        for name, one in gradients.items():
            torch.testing.assert_close(one, alone[name], rtol=2e-2, atol=1e-3)


class NormedTwice(nn.LayerNorm):
    """A norm around another one, with a product of both that takes one number type."""

    def __init__(self) -> None:
        super().__init__(WIDTH)
        self.inner = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.inner(x) @ self.weight.diag())


class NormedPast(Normed):
    """Also calls the inner norm past the outer one, beside a layer that takes one number type."""

    def forward(self, x: Tensor) -> Tensor:
        inner: Tensor = self.linear(self.norm.get_submodule("inner")(x))
        return super().forward(x) + inner


def train_with_frozen_norms() -> list[tuple[float, torch.dtype]]:
    """The loss of a step with frozen norms in bf16 that compute in fp32, and their type inside."""
    layers = [NormedPast().bfloat16() for _ in range(2)]
    for layer in layers:
        layer.norm = NormedTwice().bfloat16().requires_grad_(False)
    x, y = (part.float() for part in data(0))
    with zeropp.parallelize(
        layers, loss_function, sample=x[:1], global_batch=BATCH, precision="bf16",
        fp32_modules=(nn.LayerNorm,), shard=2,
    ) as model:  # fmt: skip
        loss = float(model.train_step(x[model.rows], y[model.rows]).loss)
    return [(loss, seen[3]) for layer in layers for seen in layer.seen]


def test_frozen_norms_in_bf16_compute_in_fp32(world: World) -> None:
    for found in world.run(train_with_frozen_norms, size=2):
        assert len(found) == 2
        assert all(loss > 0 and dtype == torch.float32 for loss, dtype in found)


class Inside(nn.Linear):
    """A linear layer that computes in fp32."""


def made_half_wide() -> list[str]:
    """What is said to a tie of a layer in fp32 with one in bf16, and to such a tie in one layer."""
    said = []
    x = data(0)[0].float()
    within = nn.Sequential(Inside(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    within[1].weight = within[0].weight
    cases: list[tuple[list[nn.Module], Any]] = [
        ([Inside(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)], ((0, "weight"), (1, "weight"))),
        ([within, nn.Linear(WIDTH, WIDTH)], None),
    ]
    degrees: list[dict[str, Any]] = [{"pp": 2}, {"shard": 2}, {"shard": 2, "chunks": 2}]
    for layers, tied in cases:
        for more in degrees:
            said.append(small_layers.error_of(lambda: zeropp.parallelize(
                layers, loss_function, sample=x[:1], global_batch=BATCH, precision="bf16",  # noqa: B023
                fp32_modules=(Inside,), tied=tied, **more,  # noqa: B023
            )))  # fmt: skip
    return said


def test_a_parameter_inside_and_outside_of_fp32_modules_is_refused(world: World) -> None:
    for said in world.run(made_half_wide, size=2):
        first, second = set(said[:3]), set(said[3:])
        assert first == {one for one in first if "InfeasibleError: fp32_modules: 'weight'" in one}
        assert second == {one for one in second if "InfeasibleError: fp32_modules: '0.w" in one}
        assert len(said) == 6
