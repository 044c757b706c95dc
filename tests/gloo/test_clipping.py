"""Clipping by the norm of the whole model's gradient, with any optimizer and any groups."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeropp
from tests.gloo.small_layers import built, data, error_of, linear, loss_function, seeded
from tests.gloo.world import World

STEPS, LIMIT = 3, 0.1
TIED = ((0, "weight"), (3, "weight"))
TOPOLOGIES: list[dict[str, Any]] = [
    {"pp": 2, "shard": 2},
    {"shard": 2, "replicate": 2, "replicate_zero": 1},
    {"pp": 2, "replicate": 2, "chunks": 2},
]


def layers_of() -> list[nn.Module]:
    """Four layers, of which the first and the last share their weight."""
    layers = seeded([linear] * 4)
    layers[3].weight = layers[0].weight
    return layers


def two_groups(decaying: Any, plain: Any) -> torch.optim.Optimizer:
    """Momentum, with weight decay for one group."""
    groups = [{"params": decaying, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.SGD(groups, lr=0.5, momentum=0.9)


def alone() -> tuple[list[float], dict[str, Tensor]]:
    """The gradient's norms before clipping, and the parameters after training, in one process."""
    model = nn.Sequential(*layers_of())
    wide, narrow = ([p for p in model.parameters() if p.dim() == n] for n in (2, 1))
    optimizer, norms = two_groups(wide, narrow), []
    for number in range(STEPS):
        inputs, targets = data(number)
        optimizer.zero_grad()
        loss_function(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), LIMIT)))
        optimizer.step()
    return norms, dict(model.named_parameters())


def clipped(degrees: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    """The same, on this rank."""
    with built(
        layers_of(),
        tied=TIED,
        clip_norm=LIMIT,
        group_of=lambda name, parameter: "wide" if parameter.dim() == 2 else "narrow",
        optimizer=lambda groups: two_groups(groups["wide"], groups["narrow"]),
        **degrees,
    ) as model:
        parts = ([part[model.rows] for part in data(number)] for number in range(STEPS))
        norms = [float(model.train_step(x, y).grad_norm) for x, y in parts]
        return norms, dict(model.full_parameters())


@pytest.mark.parametrize("degrees", TOPOLOGIES, ids=str)
def test_any_optimizer_is_clipped_as_in_one_process(world: World, degrees: dict[str, Any]) -> None:
    norms, parameters = alone()
    assert min(norms) > 2 * LIMIT
    for found, values in world.run(clipped, degrees, size=4):
        assert found == pytest.approx(norms, rel=1e-9)
        for name, value in values.items():
            torch.testing.assert_close(value, parameters[name].detach().float(), rtol=0, atol=1e-6)


def resumed(folder: str) -> tuple[list[float], list[float]]:
    """Norms that hooks have clipped by: in a model that is saved before its first update, and in
    one that is loaded, of an optimizer that consists of two."""
    norms: list[list[Tensor]] = [[], []]
    for number, found in enumerate(norms):
        with built(
            layers_of(),
            tied=TIED,
            shard=2,
            group_of=lambda name, parameter: "wide" if parameter.dim() == 2 else "narrow",
            optimizer=lambda groups: [torch.optim.Adam(part) for part in groups.values()],
        ) as model:

            def clip(*_: object, model: Any = model, found: list[Tensor] = found) -> None:
                found.append(model.clip_grad_norm_(LIMIT))

            model.optimizer.register_step_pre_hook(clip)
            model.load(folder) if number else model.save(folder)
            x, y = (part[model.rows] for part in data())
            model.train_step(x, y)
    first, second = ([float(norm) for norm in found] for found in norms)
    return first, second


def test_a_checkpoint_calls_no_hooks(world: World, tmp_path: Path) -> None:
    for saved, loaded in world.run(resumed, str(tmp_path / "checkpoint"), size=2):
        assert len(saved) == 1
        assert loaded == saved


def by_hook(norm_type: float) -> tuple[list[float], list[float], str]:
    """Norms that a hook has clipped by, the largest elements afterwards, and what a call outside of
    an update says."""
    with built(layers_of(), tied=TIED, shard=2) as model:
        norms: list[Tensor] = []

        def clip(*_: object) -> None:
            norms.append(model.clip_grad_norm_(LIMIT, norm_type))
            with pytest.raises(ValueError, match=r"^clip_grad_norm_: norm_type=0.0: must be more"):
                model.clip_grad_norm_(LIMIT, 0)

        model.optimizer.register_step_pre_hook(clip)
        parts = ([part[model.rows] for part in data(number)] for number in range(STEPS))
        for x, y in parts:
            model.train_step(x, y)
        largest = [float(gradient.abs().max()) for _, gradient in model.gradients()]
        said = error_of(lambda: model.clip_grad_norm_(LIMIT))
        return [float(norm) for norm in norms], [max(largest)], said


@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
def test_a_hook_clips_by_any_norm_of_the_whole_gradient(world: World, norm_type: float) -> None:
    model = nn.Sequential(*layers_of())
    optimizer, norms = torch.optim.SGD(model.parameters(), lr=0.1), []
    for number in range(STEPS):
        inputs, targets = data(number)
        optimizer.zero_grad()
        loss_function(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), LIMIT, norm_type)))
        optimizer.step()
    largest = max(float(one.grad.abs().max()) for one in model.parameters() if one.grad is not None)
    for found, found_largest, said in world.run(by_hook, norm_type, size=2):
        assert found == pytest.approx(norms, rel=1e-9)
        assert found_largest == pytest.approx([largest], rel=1e-9)
        assert said.startswith("RuntimeError: clip_grad_norm_: no update is under way")


def both() -> list[str]:
    """What ``parallelize`` says to clipping in two places, and to as much in both."""
    config = zeropp.OptimizerConfig("sgd", clip_norm=0.5)
    layers = seeded([linear])
    calls = (partial(built, layers, optimizer=config, clip_norm=norm) for norm in (1.0, -1.0, 0.5))
    return [error_of(call) for call in calls]


def test_two_norms_to_clip_to_are_refused(world: World) -> None:
    (said,) = world.run(both, size=1)
    assert said[0].startswith("InfeasibleError: clip_norm=1.0: the optimizer's configuration has")
    assert said[1].startswith("InfeasibleError: clip_norm=-1.0: must be at least 0")
    assert said[2] == ""
