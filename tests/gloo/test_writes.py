"""Writes to a model's parameters between steps, which the optimizer's values would not see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.gloo.small_layers import WIDTH, Scale, built, data, error_of, linear, seeded, step
from tests.gloo.world import World

SIZE = 2


WRITES: dict[str, Callable[[Any], object]] = {
    "scale": lambda one: one.scale.fill_(100.0),
    "clamped scale": lambda one: one.scale.clamp_(max=0.5),
    "weight": lambda one: one.linear.weight.zero_(),
    "weight's data": lambda one: one.linear.weight.data.zero_(),
    "other data": lambda one: setattr(one.linear.weight, "data", torch.ones(WIDTH, WIDTH)),
}


class Scaled(Scale):
    """Has a linear layer beside its scale."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.linear(x))


def written_between_steps() -> tuple[dict[str, str], list[list[float]], bool]:
    """What a step says after rank 1 has written to a parameter in each of several ways; the losses
    of this model, and of one that nobody wrote to; whether all parameters are NaN afterwards."""
    found: dict[str, str] = {}
    losses: list[list[float]] = []
    hidden: list[bool] = []
    for writes in (WRITES, {}):
        layers = seeded([Scaled] * 3)
        with built(layers, shard=SIZE) as model:
            losses.append([step(model, 0)])
            for name, write in writes.items():
                with torch.no_grad():
                    if dist.get_rank() == 1:
                        write(layers[1])
                found[name] = error_of(lambda m=model: step(m))  # type: ignore[misc]
            losses[-1].append(step(model, 1))
            hidden += [bool(one.isnan().all()) for layer in layers for one in layer.parameters()]
    return found, losses, len(hidden) == 18 and all(hidden)


def test_writes_to_sharded_layers_between_steps_are_an_error(world: World) -> None:
    for rank, (found, losses, hidden) in enumerate(world.run(written_between_steps, size=SIZE)):
        assert hidden
        assert losses[0] == losses[1]
        assert set(found) == set(WRITES)
        for name, said in found.items():
            parameter = "scale" if "scale" in name else "linear.weight"
            own = f"RuntimeError: layers[1]: '{parameter}' was written to after parallelize"
            assert said.startswith(own if rank == 1 else f"PeerError: rank 1 raised {own}"), said
            assert "\n" not in said


def test_a_write_to_one_parameter_does_not_show_in_others(world: World) -> None:
    assert world.run(read_beside_a_write, size=SIZE) == [True] * SIZE


def read_beside_a_write() -> bool:
    """Whether one layer's parameters are still NaN after a write through another's ``.data``."""
    layers = seeded([Scaled] * 2)
    with built(layers, shard=SIZE) as model:
        step(model)
        layers[0].get_parameter("scale").data.fill_(100.0)
        return all(bool(one.isnan().all()) for one in layers[1].parameters())


def written_copies() -> list[str]:
    """What steps say after rank 1 has written to a bf16 copy of the optimizer's values that stays
    in memory."""
    layers = [layer.float() for layer in seeded([linear] * 3)]
    degrees: dict[str, Any] = {"replicate": SIZE, "replicate_zero": 1, "precision": "bf16"}
    sample = data()[0][:1].float()
    with built(layers, sample=sample, **degrees) as model:
        inputs, targets = (part[model.rows].float() for part in data())
        model.train_step(inputs, targets)
        with torch.no_grad():
            if dist.get_rank() == 1:
                layers[1].get_parameter("weight").fill_(5.0)
        return [error_of(lambda: model.train_step(inputs, targets)) for _ in range(2)]


def test_writes_to_copies_of_the_optimizer_s_values_are_an_error(world: World) -> None:
    own = "RuntimeError: layers[1]: 'weight' was written to after parallelize"
    for rank, said in enumerate(world.run(written_copies, size=SIZE)):
        assert len(said) == 2
        for line in said:  # again in every step, because the write is not undone
            assert line.startswith(own if rank == 1 else f"PeerError: rank 1 raised {own}"), line
            assert "build the model anew" in line
