"""``zeropp.parallelize`` as a user's script calls it: right, or one clear error on every rank."""

from __future__ import annotations

from datetime import timedelta
from functools import cache, partial

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.nn.utils import parametrizations

import zeropp
from tests.gloo.cuts import beside_cuts
from tests.gloo.small_layers import (
    BATCH,
    WIDTH,
    Kind,
    built,
    data,
    error_of,
    linear,
    seeded,
    trained_alone,
)
from tests.gloo.world import World

RATE, SCALE = 0.1, 1.5


class Remembering(nn.Module):
    """Caches a tensor in its first forward, as rotary embeddings do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.scale: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.scale is None:
            self.scale = torch.full((WIDTH,), 0.7, dtype=x.dtype, device=x.device)
        scaled: Tensor = self.linear(x) * self.scale
        return scaled


class Branching(nn.Module):
    """Looks at values, as a router of experts does: no trial without values can run it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) if float(x.sum()) > -1e9 else x


class InPlace(nn.Module):
    """An activation that overwrites what a biased linear layer gave for a tensor of three
    dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.linear(x[:, None]), inplace=True)[:, 0] + x


class Unused(nn.Module):
    """Holds a parameter that no forward uses, a scalar one, an empty one, and a buffer that is one
    number in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.spare = nn.Parameter(torch.ones(3))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(0))
        self.register_buffer("places", torch.ones(1, dtype=torch.long).expand(3))

    def forward(self, x: Tensor) -> Tensor:
        scaled: Tensor = self.linear(x) * self.scale
        return scaled


def weight_normed() -> nn.Module:
    return nn.Sequential(parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh())


def frozen() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH).requires_grad_(False)


def half_frozen() -> nn.Module:
    layer = nn.Linear(WIDTH, WIDTH)
    layer.bias.requires_grad_(False)
    return layer


def expanded() -> nn.Module:
    """A linear layer whose weight is one row in memory, at first."""
    layer = nn.Linear(WIDTH, WIDTH)
    layer.weight = nn.Parameter(torch.randn(1, WIDTH, dtype=torch.float64).expand(WIDTH, WIDTH))
    return layer


def group_norm() -> nn.Module:
    return nn.GroupNorm(2, WIDTH)


# Every unusual layer stands in both models, and beside a cut of some topology in one of them.
FIRST: list[Kind] = [
    linear,
    Branching,
    Remembering,
    InPlace,
    weight_normed,
    Unused,
    half_frozen,
    expanded,
    frozen,
    group_norm,
    linear,
    nn.Tanh,
]
# The first stage of several has nothing that is trained, so that nothing sends a gradient to it.
SECOND: list[Kind] = [
    frozen,
    frozen,
    nn.Tanh,
    frozen,
    group_norm,
    weight_normed,
    InPlace,
    Unused,
    Branching,
    expanded,
    half_frozen,
    Remembering,
]
MODELS = {"all kinds": FIRST, "frozen first": SECOND}
DEGREES = [
    {"pp": 2, "shard": 2, "replicate": 1, "chunks": 2},
    {"pp": 1, "shard": 3, "replicate": 1, "chunks": 1},
    {"pp": 3, "shard": 1, "replicate": 2, "chunks": 1},
]
STEPS = 2
LEAST_MOVE = 1e-4  # of each trained parameter, a hundred times what a difference may be


def made(name: str) -> list[nn.Module]:
    """Layers of a model, equal on every rank. Their weights are larger than torch makes them, so
    that gradients do not vanish over twelve layers."""
    layers = seeded(MODELS[name])
    with torch.no_grad():
        for parameter in nn.ModuleList(layers).parameters():
            if parameter.dim() > 1 and parameter.is_contiguous():
                parameter.copy_(SCALE * parameter)
    return layers


@cache
def alone(name: str) -> dict[str, Tensor]:
    """Parameters after plain SGD in one process, by ``{layer}.{name}``. Each one that is used and
    trained has moved far enough that a wrong gradient would be seen."""
    before = dict(nn.ModuleList(made(name)).named_parameters())
    model = trained_alone(made(name), map(data, range(STEPS)), partial(torch.optim.SGD, lr=RATE))
    for key, value in model.named_parameters():
        if value.grad is not None and value.numel():
            assert float((value - before[key]).abs().max()) > LEAST_MOVE, key
    return {key: value.detach() for key, value in model.named_parameters()}


def train(name: str, degrees: dict[str, int], expected: dict[str, Tensor]) -> dict[str, float]:
    """How far each parameter of this rank is from that of one process."""
    optimizer = zeropp.OptimizerConfig("sgd", lr=RATE)
    weights = [1.0] * len(MODELS[name])  # so that every stage has as many layers
    with built(made(name), optimizer=optimizer, weights=weights, **degrees) as model:
        for step in range(STEPS):
            inputs, targets = data(step)
            model.train_step(inputs[model.rows], targets[model.rows])
        found = dict(model.full_parameters())
    apart = {key: (value.double() - expected[key]).abs() for key, value in found.items()}
    return {key: float(one.max()) if one.numel() else 0.0 for key, one in apart.items()}


def test_every_unusual_layer_stands_beside_a_cut() -> None:
    assert {*FIRST} - {linear} == {*SECOND}
    pairs = [beside_cuts(kinds, degrees) for kinds in MODELS.values() for degrees in DEGREES]
    assert {*SECOND} <= {kind for pair in set().union(*pairs) for kind in pair}


@pytest.mark.parametrize("degrees", DEGREES, ids=lambda d: "x".join(map(str, d.values())))
@pytest.mark.parametrize("name", MODELS)
def test_layers_train_as_in_one_process(world: World, name: str, degrees: dict[str, int]) -> None:
    expected = alone(name)
    size = degrees["pp"] * degrees["shard"] * degrees["replicate"]
    errors = world.run(train, name, degrees, expected, size=size)
    assert {key for found in errors for key in found} == set(expected)
    for found in errors:
        assert {
            key: error for key, error in found.items() if not error < 1e-6
        } == {}  # they are fp32


def train_with_mesh() -> list[int]:
    """Train one step on a mesh of the user's; the rows that this rank was told are its own."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "shard"))
    model = built(seeded([linear] * 4), mesh=mesh)
    inputs, targets = data()
    model.train_step(inputs[model.rows], targets[model.rows])
    assert model.data_parallel_size == 2
    assert (model.data_parallel_rank, model.rows.start) in ((0, 0), (1, BATCH // 2))
    return [model.rows.start, model.rows.stop]


def test_a_users_mesh(world: World) -> None:
    assert world.run(train_with_mesh, size=4) == [[0, 6], [6, 12], [0, 6], [6, 12]]


def train_on_a_numbered_cpu() -> list[float]:
    """Losses of a step where the device is the CPU with an index, and with none."""
    losses = []
    for device in ("cpu:0", "cpu"):
        with built(seeded([linear] * 4), pp=2, device=device) as model:
            losses.append(float(model.train_step(*data()).loss))
    return losses


def test_a_cpu_with_an_index_is_the_cpu(world: World) -> None:
    for numbered, plain in world.run(train_on_a_numbered_cpu, size=2):
        assert numbered == plain > 0


def misused() -> dict[str, str]:
    """What wrong steps say, and what a step says after one that raised."""
    model = built(seeded([linear] * 4), pp=2, timeout=timedelta(seconds=8))
    inputs, targets = data()
    found = {"rows": error_of(lambda: model.train_step(inputs[:3], targets[:3]))}
    with torch.no_grad():
        found["no_grad"] = error_of(lambda: model.train_step(inputs, targets))
    # The first stage raises, and its peer waits for it no longer than told.
    found["raised"] = error_of(lambda: model.train_step(inputs[:, :3], targets))
    found["again"] = error_of(lambda: model.train_step(inputs, targets))
    return found


def test_steps_that_cannot_be_right(world: World) -> None:
    for found in world.run(misused, size=2):
        assert found["rows"].startswith("ValueError: inputs: 3 rows, but this rank trains on 12")
        assert found["no_grad"].startswith("RuntimeError: train_step: gradients are disabled")
        assert found["raised"]
        assert found["again"].startswith("RuntimeError: an earlier step raised")
