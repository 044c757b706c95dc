"""Unusual layers, losses and optimizers of a user's: as in one process, or one error everywhere."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.nn import functional as F

from tests.gloo.layers import (
    ROWS,
    WIDTH,
    Conjugates,
    GivesComplex,
    GivesParameter,
    Kind,
    Overwriting,
    Saving,
    Sharing,
    TakesComplex,
    TakesTwo,
    TwoTypes,
    linear,
)
from tests.gloo.models import (
    MICROBATCH,
    MODELS,
    REFUSED,
    STEPS,
    alone,
    apart,
    beside_cuts,
    built,
    data,
    error_of,
    kinds_of,
    ranks_of,
    seeded,
    step,
    steps,
    trained_alone,
)
from tests.gloo.world import World, on_ranks

DEGREES: list[dict[str, Any]] = [
    {"pp": 3, "chunks": 3},
    {"pp": 2, "chunks": 4, "split_backward": False},
    {"pp": 2, "shard": 2, "chunks": 3},
    {"pp": 2, "replicate": 2, "replicate_zero": 1, "recompute": "full"},
    {"shard": 3},
    {"pp": 3, "replicate": 2},
]


def train(degrees: dict[str, Any], place: Path) -> None:
    """Train and save each model."""
    for name, what in MODELS.items():
        kinds = kinds_of(name, degrees)
        with built(
            seeded(kinds, what.scale), sample=data()[0][:MICROBATCH], weights=[1.0] * len(kinds),
            **degrees,
        ) as model:  # fmt: skip
            steps(model, *range(STEPS))
            model.save(place / name)


@pytest.mark.parametrize("degrees", DEGREES, ids=str)
def test_unusual_layers_are_those_of_one_process(
    world: World, degrees: dict[str, Any], tmp_path: Path
) -> None:
    world.run(train, degrees, tmp_path, size=ranks_of(degrees))
    for name, what in MODELS.items():
        kinds = kinds_of(name, degrees)
        expected = alone(name, kinds)
        found = {key: torch.full_like(value, torch.nan) for key, value in expected.items()}
        load({"model": found}, checkpoint_id=str(tmp_path / name), no_dist=True)
        for key, value in expected.items():
            if value.numel():
                error = apart({key: found[key]}, expected)
                assert error < what.tolerance, (name, key, kinds[int(key.partition(".")[0])])


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


class Tokens(nn.Module):
    """Integers in, integers out: nothing before it can have a gradient."""

    def forward(self, tokens: Tensor) -> Tensor:
        return (tokens + 1) % 5


def embed() -> nn.Module:
    """An embedding behind it."""
    return nn.Embedding(5, WIDTH)


class Forgetful(nn.Module):
    """A layer whose output does not depend on its input."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.full((WIDTH,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.value.expand(x.shape)


def in_place() -> nn.Module:
    """Changes what it is given."""
    return nn.ReLU(inplace=True)


IN_PLACE = [linear, in_place, linear, in_place]
INTEGERS = [Tokens, Tokens, embed, linear]
FORGETFUL = [linear, linear, Forgetful, linear]


@pytest.mark.parametrize("kinds", [INTEGERS, FORGETFUL, IN_PLACE], ids=["int", "forgets", "place"])
@pytest.mark.parametrize("pp", [2, 4])
@on_ranks(lambda pp: pp)
def test_boundaries_with_no_gradient_or_work_in_place(pp: int, kinds: list[Kind]) -> None:
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randint(5, (ROWS,), generator=generator) if Tokens in kinds else data()[0]
    batches = [(inputs, data()[1])] * 2
    expected = trained_alone(seeded(kinds), batches, partial(torch.optim.SGD, lr=0.1))
    model = built(seeded(kinds), sample=inputs[:1], pp=pp, weights=[1.0] * len(kinds))
    for batch in batches:
        model.train_step(*batch)
    own = dict(model.full_parameters())
    assert not own or apart(own, dict(expected.named_parameters())) < 1e-6  # they come as fp32


@pytest.mark.parametrize("degrees", [{"pp": 2}, {"shard": 2}], ids=str)
@on_ranks(2)
def test_targets_in_memory_of_inputs_stay_as_they_were(degrees: dict[str, Any]) -> None:
    """Also where the first layer changes its inputs in place."""
    losses = []
    for is_same in (True, False):
        with built(seeded([in_place, linear, linear]), **degrees) as model:
            inputs, _ = data()
            targets = inputs if is_same else inputs.clone()
            result = model.train_step(inputs[model.rows], targets[model.rows])
            losses.append(float(result.loss))
    assert losses[0] == losses[1]


@on_ranks(2)
def test_two_types_and_a_rate_in_a_tensor_go_on_from_a_checkpoint(tmp_path: Path) -> None:
    rate = lambda groups: torch.optim.AdamW(groups["all"], lr=torch.tensor(0.01), amsgrad=True)  # noqa: E731
    kinds = [linear, TwoTypes, TwoTypes, linear]
    with (
        built(seeded(kinds), shard=2, optimizer=rate) as first,
        built(seeded(kinds), shard=2, optimizer=rate) as second,
    ):
        step(first)
        first.optimizer.param_groups[0]["lr"].fill_(0.005)
        first.save(tmp_path / "saved")
        second.load(tmp_path / "saved")
        assert steps(first, 1, 2) == steps(second, 1, 2)
        rates = [float(model.optimizer.param_groups[0]["lr"]) for model in (first, second)]
        assert rates[0] == rates[1] == pytest.approx(0.005)


def refused() -> dict[str, str]:
    """What ``parallelize`` says to layers and optimizers that cannot be trained rightly, also where
    torch warns of what our own checks do."""
    group_of = lambda name, parameter: "wide" if parameter.dim() > 1 else "narrow"  # noqa: E731
    calls: dict[str, Callable[[], Any]] = {
        "loss": lambda: built(pp=2, loss_fn=nn.Linear(WIDTH, 1)),
        "group": lambda: built(
            pp=2, group_of=group_of, optimizer=lambda groups: torch.optim.SGD(groups["all"])
        ),
        "mask": lambda: built(
            seeded([linear, Overwriting, linear]), sample_keywords={"other": data()[1][:1]}, pp=2
        ),
        "auto": lambda: built(seeded([linear, Sharing, Sharing]), pp="auto", cluster="a800"),
        "made lazy": lambda: built([lambda: nn.LazyLinear(WIDTH)], shard=2),
    }

    def call(kinds: Sequence[Kind], tokens: bool) -> Any:
        inputs = torch.arange(MICROBATCH) if tokens else data()[0][:MICROBATCH]
        return built(seeded(kinds), sample=inputs, pp=2)

    for name, (kinds, _) in REFUSED.items():
        calls[name] = partial(call, kinds, name == "max_norm")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Casting complex values")
        return {name: error_of(call) for name, call in calls.items()}


def test_layers_that_would_be_wrong_are_refused(world: World) -> None:
    first, second = world.run(refused, size=2)
    assert first == second
    for name, words in {
        **{name: words for name, (_, words) in REFUSED.items()},
        "group": "optimizer: asks for group 'all', but there is 'narrow' and 'wide'",
        "mask": "layers[1]: its forward changes 'other' in place, which other inputs or",
        "auto": "layers[1]: its forward changes 'mean', which another layer has, too",
        "made lazy": "layers[0]: 'weight' has no shape yet",
        "loss": "loss_fn: has the parameter 'weight', which nothing would train",
    }.items():
        said = first.pop(name)
        assert said.startswith(f"InfeasibleError: {words}"), said
        assert "\n" not in said
    assert not first


@on_ranks(2)
def test_an_empty_state_and_numbers_of_a_graph_are_no_reason() -> None:
    built(seeded([linear, Saving, linear]), sample=data()[0][:MICROBATCH], pp=2)


def backward_by_itself(output: Tensor, target: Tensor) -> Tensor:
    """A loss function as in a loop of its own."""
    loss = F.mse_loss(output, target)
    loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
    return loss


LOSSES: dict[str, tuple[Callable[[Tensor, Tensor], Any], str]] = {
    "backward": (backward_by_itself, "InfeasibleError: loss_fn: calls backward, as train_step"),
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


@pytest.mark.parametrize("name", LOSSES)
@on_ranks(1)
def test_a_loss_that_is_none_is_an_error(name: str) -> None:
    function, words = LOSSES[name]
    with built(loss_fn=function, sample=data()[0][:MICROBATCH]) as model:
        assert error_of(lambda: model.train_step(*data())).startswith(words)
