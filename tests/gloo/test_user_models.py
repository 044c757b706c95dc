"""Unusual layers, losses and optimizers of a user's: as in one process, or one error everywhere."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.nn import functional as F

import zeropp
from tests.gloo.cuts import Make, beside_cuts
from tests.gloo.user_layers import (
    WIDTH,
    Conjugates,
    GivesComplex,
    GivesParameter,
    TakesComplex,
    TakesTwo,
    TwoTypes,
    linear,
)
from tests.gloo.user_models import (
    MICROBATCH,
    MODELS,
    RATE,
    REFUSED,
    ROWS,
    STEPS,
    alone,
    data,
    kinds_of,
    made,
)
from tests.gloo.world import World
from zeropp.train.parallel_model import ParallelModel

DEGREES: list[dict[str, Any]] = [
    {"pp": 3, "chunks": 3},
    {"pp": 2, "chunks": 4, "split_backward": False},
    {"pp": 2, "shard": 2, "chunks": 3},
    {"pp": 2, "replicate": 2, "replicate_zero": 1, "recompute": "full"},
]


def parallel(
    kinds: Sequence[Make], tokens: bool = False, scale: float = 1.0, **more: Any
) -> ParallelModel:
    usual: dict[str, Any] = {
        "optimizer": lambda groups: torch.optim.SGD(groups["all"], lr=RATE),
        "loss_fn": F.mse_loss,
    }
    arguments = {**usual, **more}
    return zeropp.parallelize(
        made(kinds, scale),
        arguments.pop("loss_fn"),
        sample=data(0, tokens)[0][:MICROBATCH],
        global_batch=ROWS,
        **arguments,
    )


def train(degrees: dict[str, Any], place: Path) -> None:
    """Train and save each model."""
    for name, what in MODELS.items():
        kinds = kinds_of(name, degrees)
        weights = [1.0] * len(kinds)
        with parallel(kinds, scale=what.scale, weights=weights, **degrees) as model:
            for step in range(STEPS):
                inputs, targets = data(step)
                model.train_step(inputs[model.rows], targets[model.rows])
            model.save(place / name)


@pytest.mark.parametrize("degrees", DEGREES, ids=str)
def test_unusual_layers_are_those_of_one_process(
    world: World, degrees: dict[str, Any], tmp_path: Path
) -> None:
    size = prod(degrees.get(axis, 1) for axis in ("pp", "shard", "replicate"))
    world.run(train, degrees, tmp_path, size=size)
    for name, what in MODELS.items():
        kinds = kinds_of(name, degrees)
        expected = alone(name, kinds)
        found = {key: torch.empty_like(value) for key, value in expected.items()}
        load({"model": found}, checkpoint_id=str(tmp_path / name), no_dist=True)
        for key, value in expected.items():
            apart = float((found[key] - value).abs().max())
            assert apart < what.tolerance, (name, key, kinds[int(key.partition(".")[0])])


def test_every_layer_stands_beside_a_cut() -> None:
    pairs = {
        pair
        for name in MODELS
        for degrees in DEGREES
        for pair in beside_cuts(kinds_of(name, degrees), degrees)
    }
    unusual = {kind for model in MODELS.values() for kind in model.kinds}
    assert unusual == {kind for pair in pairs for kind in pair}
    handed_on = [(GivesParameter, TakesTwo), (GivesComplex, Conjugates), (Conjugates, TakesComplex)]
    assert pairs.issuperset(handed_on)


def gone_on(place: Path) -> list[tuple[float, float]]:
    """Losses of a model of two number types and of one that goes on from its checkpoint; then the
    learning rate, a tensor, as it was saved and as it was loaded."""
    rate = lambda groups: torch.optim.AdamW(groups["all"], lr=torch.tensor(0.01), amsgrad=True)  # noqa: E731
    with (
        parallel([linear, TwoTypes, TwoTypes, linear], shard=2, optimizer=rate) as first,
        parallel([linear, TwoTypes, TwoTypes, linear], shard=2, optimizer=rate) as second,
    ):
        step(first, 0)
        first.optimizer.param_groups[0]["lr"].fill_(0.005)
        first.save(place)
        second.load(place)
        losses = [(step(first, number), step(second, number)) for number in (1, 2)]
        first_rate, second_rate = (
            float(model.optimizer.param_groups[0]["lr"]) for model in (first, second)
        )
        return [*losses, (first_rate, second_rate)]


def step(model: ParallelModel, number: int) -> float:
    """The loss of one step."""
    inputs, targets = data(number)
    return float(model.train_step(inputs[model.rows], targets[model.rows]).loss)


def test_two_types_and_a_rate_in_a_tensor_go_on_from_a_checkpoint(
    world: World, tmp_path: Path
) -> None:
    for found in world.run(gone_on, tmp_path / "saved", size=2):
        assert len(found) == 3
        assert all(one == other for one, other in found)


def said_by(call: Callable[[], object]) -> str:
    """What a call raises, also where torch warns of what our own checks do; empty for nothing."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "Casting complex values")
            call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def refused() -> dict[str, str]:
    """What ``parallelize`` says to layers and optimizers that cannot be trained rightly."""
    found = {}
    for name, (kinds, _) in REFUSED.items():
        tokens = name == "max_norm"
        found[name] = said_by(lambda k=kinds, t=tokens: parallel(k, t, pp=2))  # type: ignore[misc]
    group_of = lambda name, parameter: "wide" if parameter.dim() > 1 else "narrow"  # noqa: E731
    loss = nn.Linear(WIDTH, 1)
    found["loss"] = said_by(lambda: parallel([linear] * 4, pp=2, loss_fn=loss))
    found["group"] = said_by(lambda: parallel([linear] * 4, pp=2, group_of=group_of))
    make: Any = lambda: nn.LazyLinear(WIDTH)  # noqa: E731
    sample = data(0)[0][:1]
    found["made lazy"] = said_by(
        lambda: zeropp.parallelize([make], F.mse_loss, sample=sample, global_batch=2, shard=2)
    )
    return found


def test_layers_that_would_be_wrong_are_refused(world: World) -> None:
    first, second = world.run(refused, size=2)
    assert first == second
    assert set(first) == {*REFUSED, "group", "loss", "made lazy"}
    for name, (_, words) in REFUSED.items():
        assert first[name].startswith(f"InfeasibleError: {words}"), first[name]
    words = "InfeasibleError: optimizer: asks for group 'all', but there is 'narrow' and 'wide'"
    assert first["group"] == words
    assert first["made lazy"].startswith("InfeasibleError: layers[0]: 'weight' has no shape yet")
    words = "InfeasibleError: loss_fn: has the parameter 'weight', which nothing would train"
    assert first["loss"].startswith(words)
    assert all("\n" not in message for message in first.values())


LOSSES: dict[str, tuple[Callable[[Tensor, Tensor], Any], str]] = {
    "rows": (
        lambda output, target: (output - target).square().mean(1),
        "TypeError: loss_fn: gives (2,), but a tensor of one number is needed",
    ),
    "a number": (
        lambda output, target: float(F.mse_loss(output, target)),
        "TypeError: loss_fn: gives float, but a tensor of one number is needed",
    ),
    "detached": (
        lambda output, target: F.mse_loss(output, target).detach(),
        "RuntimeError: train_step: the loss depends on nothing that is trained",
    ),
}


def wrong_losses() -> dict[str, str]:
    """What a step says to loss functions that give no loss."""
    found = {}
    for name, (function, _) in LOSSES.items():
        with parallel([linear] * 4, loss_fn=function) as model:
            found[name] = said_by(lambda m=model: m.train_step(*data(0)))  # type: ignore[misc]
    return found


def test_a_loss_that_is_none_is_an_error(world: World) -> None:
    (found,) = world.run(wrong_losses, size=1)
    assert set(found) == set(LOSSES)
    for name, (_, words) in LOSSES.items():
        assert found[name].startswith(words)
