"""Models that are made from the same layers, one after another or at the same time, and steps from
which nothing can be learnt."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from torch import Tensor, nn

from tests.gloo.small_layers import Kind, Scale, built, data, error_of, linear, seeded, step
from tests.gloo.world import World
from zeropp.train.parallel_model import ParallelModel

SIZE = 2


def made_twice() -> tuple[str, list[float], list[float]]:
    """What a second model of the same layers says, and the first one after it was closed; the
    losses of the first one and then of another one of these layers; and the losses of one model
    that is trained as long."""
    layers = seeded([linear] * 4)
    with built(layers, pp=SIZE) as first:
        found = [step(first, 0)]
        said = error_of(lambda: built(layers, pp=SIZE))
        found.append(step(first, 1))
    closed = {error_of(lambda: step(first)), error_of(first.full_state_dict)}
    assert closed == {
        "RuntimeError: this model was closed (create a new model, and load a checkpoint)"
    }
    with built(layers, pp=SIZE) as again:
        found += [step(again, 2), step(again, 3)]
    with built(seeded([linear] * 4), pp=SIZE) as alone:
        return said, found, [step(alone, number) for number in range(4)]


def test_layers_belong_to_one_model_until_it_is_closed(world: World) -> None:
    for said, found, expected in world.run(made_twice, size=SIZE):
        assert said.startswith("InfeasibleError: layers[0]: 'weight' belongs to another model that")
        assert found == expected
        assert len(set(found)) == 4


def refused_by_a_peer() -> tuple[str, float]:
    """What a model says of which rank 1 alone has a layer of another model; and its loss, made
    again after that one was closed."""
    taken, new = seeded([linear] * 2), seeded([linear])
    with built(taken, pp=SIZE):
        said = error_of(lambda: built([new[0], taken[1]], pp=SIZE))
    with built([new[0], taken[1]], pp=SIZE) as model:
        return said, step(model)


def test_a_model_that_a_peer_has_refused_keeps_no_layers(world: World) -> None:
    for said, loss in world.run(refused_by_a_peer, size=SIZE):
        assert said.startswith("InfeasibleError: layers[1]: 'weight' belongs to another model that")
        assert loss > 0


def made_after_sharding() -> dict[str, str]:
    """What a model says to layers whose values an earlier model, now closed, has sharded, and to
    copies that were taken of them between its steps."""
    found = {}
    lots: dict[str, list[Kind]] = {"linear": [linear] * 4, "scale": [Scale] * 4}
    for name, kinds in lots.items():
        layers = seeded(kinds)
        with built(layers, shard=SIZE) as first:
            step(first)
            copies = copy.deepcopy(layers)
        found[name] = error_of(lambda lot=layers: built(lot, shard=SIZE))  # type: ignore[misc]
        found[f"{name} copied"] = error_of(lambda lot=copies: built(lot, pp=SIZE))  # type: ignore[misc]
    return found


def test_layers_without_values_are_refused(world: World) -> None:
    for found in world.run(made_after_sharding, size=SIZE):
        assert set(found) == {"linear", "scale", "linear copied", "scale copied"}
        for name, said in found.items():
            parameter = "weight" if name.startswith("linear") else "scale"
            assert said.startswith(f"InfeasibleError: layers[0]: '{parameter}' has no values"), said
            assert "\n" not in said


def read_between_steps(degrees: dict[str, Any]) -> tuple[bool, list[float], list[float]]:
    """Whether layers are NaN to whoever reads them between steps; and the losses of a model whose
    layers were read and copied, and of one whose layers were left alone."""
    losses: list[list[float]] = []
    unread = []
    for reads in (True, False):
        layers = seeded([linear] * 4)
        with built(layers, **degrees) as model:
            losses.append([])
            for number in range(3):
                losses[-1].append(step(model, number))
                if reads:
                    copies = copy.deepcopy(layers)
                    unread += [bool(p.isnan().all()) for one in copies for p in one.parameters()]
                    unread += [bool(p.isnan().all()) for one in layers for p in one.parameters()]
                    evaluated(model)
    return len(unread) == 48 and all(unread), losses[0], losses[1]


def evaluated(model: ParallelModel) -> float:
    """The loss of a batch."""
    inputs, targets = data(9)
    return model.eval_step(inputs[model.rows], targets[model.rows])


@pytest.mark.parametrize("degrees", [{"shard": 2}, {"shard": 2, "chunks": 2}], ids=str)
def test_sharded_layers_can_be_read_between_steps(world: World, degrees: dict[str, Any]) -> None:
    for unread, found, expected in world.run(read_between_steps, degrees, size=SIZE):
        assert unread
        assert found == expected
        assert len(set(found)) == 3


def in_turn() -> tuple[list[float], list[float]]:
    """Losses of two models, trained in turn; and of the same two, one after the other."""
    degrees: list[dict[str, Any]] = [{"pp": SIZE}, {"shard": SIZE}]
    layers = [seeded([linear] * 4), seeded([linear] * 3)]
    with built(layers[0], **degrees[0]) as one, built(layers[1], **degrees[1]) as other:
        found = [step(model, number) for number in range(3) for model in (one, other)]
    expected = []
    for count, more in zip((4, 3), degrees, strict=True):
        with built(seeded([linear] * count), **more) as model:
            expected.append([step(model, number) for number in range(3)])
    return found, [loss for pair in zip(*expected, strict=True) for loss in pair]


def test_two_models_in_one_process(world: World) -> None:
    for found, expected in world.run(in_turn, size=SIZE):
        assert found == expected
        assert len(found) == 6


class Detaching(nn.Module):
    """Gives nothing before it a gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return x.detach().tanh()


def frozen() -> nn.Module:
    """A layer that is not trained."""
    return linear().requires_grad_(False)


UNTRAINED: dict[str, list[Kind]] = {
    "all frozen": [frozen] * 4,
    "no parameters": [nn.Tanh] * 4,
    "detached": [linear, Detaching, frozen, frozen],
}


def untrained() -> dict[str, str]:
    """What a step says where the loss depends on no trained parameter of the last stage."""
    found = {}
    for name, kinds in UNTRAINED.items():
        with built(seeded(kinds)) as model:
            assert model.eval_step(*data()) > 0
            found[name] = error_of(lambda m=model: step(m))  # type: ignore[misc]
    return found


def test_a_loss_that_depends_on_nothing_trained(world: World) -> None:
    (found,) = world.run(untrained, size=1)
    assert set(found) == set(UNTRAINED)
    for name, said in found.items():
        assert "the loss depends on nothing that is trained" in said, (name, said)
