"""``zeropp.parallelize`` as a user's script calls it: right, or one clear error on every rank."""

from __future__ import annotations

import copy
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from tests.gloo.small_layers import (
    BATCH,
    WIDTH,
    built,
    data,
    error_of,
    linear,
    loss_function,
    seeded,
)
from tests.gloo.world import World

Make = Callable[[], list[nn.Module]]


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
    """An activation that overwrites what a biased linear layer gave."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.linear(x), inplace=True) + x


class Unused(nn.Module):
    """Holds a parameter that no forward uses, a scalar one, and an empty one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.spare = nn.Parameter(torch.ones(3))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(0))

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


KINDS: dict[str, list[Callable[[], nn.Module]]] = {
    "linear": [linear] * 6,
    "remembering": [Remembering] * 6,
    "branching": [linear, Branching, Branching, linear, Branching, linear],
    "in place": [linear, InPlace, InPlace, InPlace, InPlace, linear],
    "weight norm": [linear, weight_normed, weight_normed, weight_normed, weight_normed, linear],
    "unused": [linear, Unused, Unused, Unused, Unused, linear],
    "expanded": [linear, expanded, linear, expanded, linear, linear],
    "frozen layer": [linear, frozen, linear, linear, frozen, linear],
    "frozen stages": [frozen, frozen, linear, linear, linear, linear],
    "frozen bias": [half_frozen] * 6,
    "no parameters": [linear, nn.Tanh, nn.Tanh, linear, nn.Tanh, linear],
    "batch norm's like": [linear, lambda: nn.GroupNorm(2, WIDTH), linear, linear, linear, linear],
}
DEGREES = [
    {"pp": 2, "shard": 1, "replicate": 1, "chunks": 1},
    {"pp": 2, "shard": 2, "replicate": 1, "chunks": 2},
    {"pp": 1, "shard": 3, "replicate": 1, "chunks": 1},
    {"pp": 3, "shard": 1, "replicate": 2, "chunks": 1},
]


def alone(layers: list[nn.Module], steps: int) -> dict[str, Tensor]:
    """Parameters after some steps of plain SGD in one process, by ``{layer}.{name}``."""
    model = nn.ModuleList(copy.deepcopy(layers))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        inputs, targets = data(step)
        for x, y in zip(inputs[:, None], targets[:, None], strict=True):
            for layer in model:
                x = layer(x)
            (loss_function(x, y) / BATCH).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def train(kind: str, degrees: dict[str, int], steps: int) -> float:
    """Largest difference of any parameter that this rank holds from one process."""
    layers = seeded(KINDS[kind])
    expected = alone(layers, steps)
    model = built(layers, **degrees)
    for step in range(steps):
        inputs, targets = data(step)
        model.train_step(inputs[model.rows], targets[model.rows])
    found = dict(model.full_parameters())
    assert found
    pairs = [(value.double(), expected[name]) for name, value in found.items() if value.numel()]
    return max((float((ours - theirs).abs().max()) for ours, theirs in pairs), default=0.0)


@pytest.mark.parametrize("degrees", DEGREES, ids=lambda d: "x".join(map(str, d.values())))
@pytest.mark.parametrize("kind", KINDS)
def test_layers_train_as_in_one_process(world: World, kind: str, degrees: dict[str, int]) -> None:
    size = degrees["pp"] * degrees["shard"] * degrees["replicate"]
    assert max(world.run(train, kind, degrees, 2, size=size)) < 1e-6  # parameters come as fp32


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
            losses.append(model.train_step(*data()).loss)
    return losses


def test_a_cpu_with_an_index_is_the_cpu(world: World) -> None:
    for numbered, plain in world.run(train_on_a_numbered_cpu, size=2):
        assert numbered == plain > 0


def misused() -> dict[str, str]:
    """What wrong steps say, and what a step says after one that raised."""
    model = built(seeded([linear] * 4), pp=2, timeout=timedelta(seconds=3))
    inputs, targets = data()
    found = {"rows": error_of(lambda: model.train_step(inputs[:3], targets[:3]))}
    with torch.no_grad():
        found["no_grad"] = error_of(lambda: model.train_step(inputs, targets))
    # The first stage raises, and its peer waits for it no longer than told.
    narrow = inputs[:, :3] if dist.get_rank() == 0 else inputs
    found["raised"] = error_of(lambda: model.train_step(narrow, targets))
    found["again"] = error_of(lambda: model.train_step(inputs, targets))
    return found


def test_steps_that_cannot_be_right(world: World) -> None:
    for found in world.run(misused, size=2):
        assert found["rows"].startswith("ValueError: inputs: 3 rows, but this rank trains on 12")
        assert found["no_grad"].startswith("RuntimeError: train_step: gradients are disabled")
        assert found["raised"]
        assert found["again"].startswith("RuntimeError: an earlier step raised")
