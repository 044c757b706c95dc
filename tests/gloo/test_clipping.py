"""Clipping by the norm of the whole model's gradient, with any optimizer and any groups."""

from __future__ import annotations

import math
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

import zeropp
from baselines.model import build_model
from benchmarks.specification.run_spec import spec_from_mapping
from benchmarks.worker.data import open_batches
from benchmarks.worker.one_process import ROUNDED, OneProcess
from tests.gloo.layers import linear
from tests.gloo.models import apart, built, data, error_of, loss_function, ranks_of, seeded, step
from tests.gloo.world import on_ranks
from tests.unit.toy_spec import mapping
from zeropp.engine.update.update_rules import clip_factor, square_norm
from zeropp.types.training import OptimizerConfig

CPU = torch.device("cpu")
STEPS, LIMIT = 3, 0.1
TIED = ((0, "weight"), (3, "weight"))
TOPOLOGIES: list[dict[str, Any]] = [
    {"pp": 2, "shard": 2},
    {"shard": 2, "replicate": 2, "replicate_zero": 1},
    {"pp": 2, "replicate": 2, "chunks": 2},
]


def layers_of() -> list[nn.Module]:
    """Four layers; the first and the last share their weight."""
    layers = seeded([linear] * 4)
    layers[3].weight = layers[0].weight
    return layers


def two_groups(groups: Any) -> torch.optim.Optimizer:
    """Momentum, with weight decay for one group."""
    decays = {"wide": 0.1, "narrow": 0.0}
    chosen = [{"params": groups[name], "weight_decay": decay} for name, decay in decays.items()]
    return torch.optim.SGD(chosen, lr=0.5, momentum=0.9)


def width_of(name: Any, parameter: Tensor) -> str:
    """The optimizer group of a parameter."""
    return "wide" if parameter.dim() == 2 else "narrow"


@cache
def alone(grouped: bool) -> tuple[list[float], dict[str, Tensor], float]:
    """The gradient's norms before clipping, the parameters after training, and the largest element
    of the last gradient, in one process."""
    model = nn.Sequential(*layers_of())
    groups: dict[str, list[nn.Parameter]] = {"wide": [], "narrow": []}
    for parameter in model.parameters():
        groups[width_of("", parameter)].append(parameter)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer, norms = two_groups(groups) if grouped else plain, []
    for number in range(STEPS):
        inputs, targets = data(number)
        optimizer.zero_grad()
        loss_function(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), LIMIT)))
        optimizer.step()
    parameters = {
        name: one.detach() for name, one in model.named_parameters(remove_duplicate=False)
    }
    largest = max(float(one.grad.abs().max()) for one in model.parameters() if one.grad is not None)
    return norms, parameters, largest


@pytest.mark.parametrize("degrees", TOPOLOGIES, ids=str)
@on_ranks(ranks_of)
def test_any_optimizer_is_clipped_as_in_one_process(degrees: dict[str, Any]) -> None:
    norms, parameters, _ = alone(True)
    assert min(norms) > 2 * LIMIT
    groups: dict[str, Any] = {"group_of": width_of, "optimizer": two_groups}
    with built(layers_of(), tied=TIED, clip_norm=LIMIT, **groups, **degrees) as model:
        parts = ([part[model.rows] for part in data(number)] for number in range(STEPS))
        found = [float(model.train_step(x, y).grad_norm) for x, y in parts]
        assert found == pytest.approx(norms, rel=1e-9)
        assert apart(dict(model.full_parameters()), parameters) < 1e-6


@on_ranks(2)
def test_a_checkpoint_calls_no_hooks(tmp_path: Path) -> None:
    """In a model that is saved before its first update, and in one that is loaded, of an optimizer
    that consists of two."""
    norms: list[list[float]] = [[], []]
    for number, found in enumerate(norms):
        with built(
            layers_of(), tied=TIED, shard=2, group_of=width_of,
            optimizer=lambda groups: [torch.optim.Adam(part) for part in groups.values()],
        ) as model:  # fmt: skip

            def clip(*_: object, model: Any = model, found: list[float] = found) -> None:
                found.append(float(model.clip_grad_norm_(LIMIT)))

            model.optimizer.register_step_pre_hook(clip)
            place = tmp_path / "checkpoint"
            model.load(place) if number else model.save(place)
            step(model)
    assert len(norms[0]) == 1
    assert norms[0] == norms[1]


@on_ranks(2)
def test_a_hook_clips_by_the_norm_of_the_whole_gradient() -> None:
    norms, _, largest = alone(False)
    with built(layers_of(), tied=TIED, shard=2) as model:
        found: list[float] = []

        def clip(*_: object) -> None:
            found.append(float(model.clip_grad_norm_(LIMIT)))

        model.optimizer.register_step_pre_hook(clip)
        for number in range(STEPS):
            step(model, number)
        assert found == pytest.approx(norms, rel=1e-9)
        own = max(float(gradient.abs().max()) for _, gradient in model.gradients())
        assert own == pytest.approx(largest, rel=1e-9)
        said = error_of(lambda: model.clip_grad_norm_(LIMIT))
        assert said.startswith("RuntimeError: clip_grad_norm_: no update is under way")


@on_ranks(1)
def test_two_norms_to_clip_to_are_refused() -> None:
    config = zeropp.OptimizerConfig("sgd", clip_norm=0.5)
    for norm, words in (
        (1.0, "InfeasibleError: clip_norm=1.0: the optimizer's configuration has"),
        (-1.0, "InfeasibleError: clip_norm=-1.0: must be at least 0"),
    ):
        said = error_of(partial(built, seeded([linear]), optimizer=config, clip_norm=norm))
        assert said.startswith(words)
    built(seeded([linear]), optimizer=config, clip_norm=0.5).close()


GRADIENTS = {
    "large": [3.0, 4.0],
    "small": [0.1, 0.0],
    "as_large_as_allowed": [1.0, 0.0],
    "zero": [0.0, 0.0],
    "infinite": [math.inf, 1.0],
    "not_a_number": [math.nan, 1.0],
}


@pytest.mark.parametrize("limit", [1e-8, 1.0, math.inf])
@pytest.mark.parametrize("gradient", GRADIENTS.values(), ids=GRADIENTS)
def test_gradients_are_scaled_as_torch_does_it_at_any_norm(
    gradient: list[float], limit: float
) -> None:
    parameter = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    parameter.grad = torch.tensor(gradient, dtype=torch.float64)
    mine = parameter.grad.clone()
    norm = nn.utils.clip_grad_norm_([parameter], limit)
    torch.testing.assert_close(
        mine.mul_(clip_factor(norm, limit)), parameter.grad, rtol=0, atol=0, equal_nan=True
    )


def test_the_gate_s_reference_takes_norms_and_clipping_from_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So that it finds what all contenders share."""
    spec = spec_from_mapping(mapping() | {"num_gpus": 1, "contender": {"name": "fsdp"}})
    for shared in (clip_factor, square_norm):
        monkeypatch.setattr(shared, "__code__", (lambda *_: torch.tensor(7.0)).__code__)
    alone = OneProcess(spec, open_batches(spec), CPU, ROUNDED["fp32"])
    course = alone.train(OptimizerConfig("sgd", lr=1.0, clip_norm=LIMIT), 1)
    moved = torch.cat([update.flatten() for update in course.updates[0].values()]).norm()
    assert float(moved) == pytest.approx(LIMIT, rel=1e-4)
    assert course.grad_norms[0] not in (7.0**0.5, pytest.approx(LIMIT))


def test_the_norm_of_20_million_numbers_is_right_on_a_cpu() -> None:
    """Where torch's own is off by 1e-3: of a flat gradient, and of one process's weights."""
    flat = torch.randn(20_000_000, generator=torch.Generator().manual_seed(0))
    right = float(flat.double().square().sum())
    for numbers in (flat, flat.view(1000, -1), flat.view(-1, 1000).t()):
        assert float(square_norm([(numbers, 1)], CPU)) == pytest.approx(right, rel=1e-6)
    values = mapping() | {"global_batch": 1, "num_gpus": 1, "contender": {"name": "fsdp"}}
    values["model"] |= {"layers": 1, "hidden": 512, "vocab": 40_000, "seq": 8, "ffn": 512}
    spec = spec_from_mapping(values)
    alone = OneProcess(spec, open_batches(spec), CPU, ROUNDED["fp32"])
    weights = [p.detach() for p in build_model(spec.model, spec.seed, CPU).parameters()]
    right = sum(float(weight.double().square().sum()) for weight in weights) ** 0.5
    assert alone.first_gradient()[2] == pytest.approx(right, rel=1e-6)


@on_ranks(2)
def test_torchs_clipping_in_a_hook_is_refused_where_it_sees_shards() -> None:
    model = built(shard=2)

    def clip(optimizer: torch.optim.Optimizer, *_: object) -> None:
        clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)  # imported before

    model.optimizer.register_step_pre_hook(clip)
    said = error_of(lambda: step(model))
    assert said.startswith("RuntimeError: torch.nn.utils.clip_grad_norm_: has the norm of this")
    plain = nn.Linear(2, 2)
    plain(torch.ones(1, 2)).sum().backward()
    assert float(nn.utils.clip_grad_norm_(plain.parameters(), 1.0)) > 1  # outside as ever
