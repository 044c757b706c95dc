"""``zeropp.parallelize`` as a user's script calls it: right, or one clear error on every rank."""

from __future__ import annotations

import copy
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.nn.utils import parametrizations

import zeropp
from tests.gloo.world import World
from zeropp.parallel_model import ParallelModel

WIDTH = 8
BATCH = 12
Make = Callable[[], list[nn.Module]]


def loss_function(output: Tensor, target: Tensor) -> Tensor:
    """Mean square error in the type of the output."""
    return F.mse_loss(output, target)


def data(step: int = 0) -> tuple[Tensor, Tensor]:
    """A global batch of vectors, in fp64."""
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(2, BATCH, WIDTH, generator=generator, dtype=torch.float64)
    return x, y


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


def seeded(kinds: list[Callable[[], nn.Module]]) -> list[nn.Module]:
    """Layers of these kinds in fp64, equal on every rank."""
    torch.manual_seed(3)
    return [kind().double() for kind in kinds]


def linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


def weight_normed() -> nn.Module:
    return nn.Sequential(parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh())


def frozen() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH).requires_grad_(False)


def half_frozen() -> nn.Module:
    layer = nn.Linear(WIDTH, WIDTH)
    layer.bias.requires_grad_(False)
    return layer


KINDS: dict[str, list[Callable[[], nn.Module]]] = {
    "linear": [linear] * 6,
    "remembering": [Remembering] * 6,
    "branching": [linear, Branching, Branching, linear, Branching, linear],
    "in place": [linear, InPlace, InPlace, InPlace, InPlace, linear],
    "weight norm": [linear, weight_normed, weight_normed, weight_normed, weight_normed, linear],
    "unused": [linear, Unused, Unused, Unused, Unused, linear],
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


def built(layers: list[nn.Module], **more: Any) -> ParallelModel:
    """The layers in parallel, with plain SGD and one row per microbatch."""
    arguments: dict[str, Any] = {
        "sample": data()[0][:1],
        "global_batch": BATCH,
        "optimizer": zeropp.OptimizerConfig("sgd", lr=0.1),
    }
    return zeropp.parallelize(layers, loss_function, **{**arguments, **more})


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


def error_of(make: Callable[[], object]) -> str:
    """What a call raises, as ``Kind: message``; empty where it raises nothing."""
    try:
        make()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def refused(case: str) -> str:
    """What ``parallelize`` says to one of the wrong calls, on this rank."""
    layers = seeded([linear] * 4)
    shared = layers[1]
    other = [*layers[:3], nn.Linear(WIDTH, WIDTH).double()]
    other[3].weight = layers[0].weight
    rank = dist.get_rank()
    if case == "other values":
        with torch.no_grad():
            next(layers[2].parameters())[0, 0] += float(rank)
    optimizer = zeropp.OptimizerConfig("sgd", lr=0.1 + (rank if case == "other rate" else 0))
    tuples = seeded([linear, lambda: nn.LSTM(WIDTH, WIDTH), linear, linear])
    calls: dict[str, dict[str, Any]] = {
        "same layer twice": {"layers": [layers[0], shared, shared, layers[3]]},
        "shared parameter": {"layers": other},
        "short weights": {"weights": [1.0, 1.0]},
        "zero weight": {"weights": [1.0, 0.0, 1.0, 1.0]},
        "tied to nothing": {"tied": ((0, "weight"), (3, "no_such"))},
        "tied in the middle": {"tied": ((0, "weight"), (2, "weight"))},
        "tied to no parameter of a function": {
            "layers": [*layers[:3], lambda: linear().double()],
            "tied": ((0, "weight"), (3, "wieght")),
        },
        "tied to another shape": {"tied": ((0, "weight"), (3, "bias"))},
        "tied to a frozen one": {
            "layers": [*layers[:3], lambda: linear().double().requires_grad_(False)],
            "tied": ((0, "weight"), (3, "weight")),
        },
        "16 bits": {
            "layers": [layer.bfloat16() for layer in seeded([linear] * 4)],
            "sample": data()[0][:1].bfloat16(),
        },
        "other values": {"shard": 2},
        "other rate": {"optimizer": optimizer, "pp": 2},
        "other knob": {"pp": 2, "unit": 1 + rank},
        "unknown knob": {"pp": 2, "tp": 2},
        "tuple": {"layers": tuples, "pp": 2},
        "no layers": {"layers": []},
        "wrong width": {"sample": torch.zeros(1, WIDTH + 1, dtype=torch.float64)},
        "too many ranks": {"pp": 3},
        "small cap": {"pp": 2, "chunks": 2, "unit": 4, "activation_cap": 3},
        "mesh and degree": {"mesh": init_device_mesh("cpu", (2,), mesh_dim_names=("pp",)), "pp": 2},
        "mesh of another axis": {"mesh": init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))},
    }
    arguments = {"layers": layers, **calls[case]}
    if not {"pp", "shard", "mesh"} & set(arguments):
        arguments["pp"] = 2
    return error_of(lambda: built(arguments.pop("layers"), **arguments))


REFUSALS = {
    "same layer twice": "layers[2]: shares 'weight' with layers[1]",
    "shared parameter": "layers[3]: shares 'weight' with layers[0]",
    "short weights": "weights: 2 numbers for 4 layers",
    "zero weight": "every weight must be more than 0",
    "tied to nothing": "layers[3] has no parameter 'no_such'",
    "tied to no parameter of a function": "layers[3] has no parameter 'wieght'",
    "tied to another shape": "both must have the same shape and type, and both be trained",
    "tied to a frozen one": "trained=False); both must have the same shape and type",
    "16 bits": "'weight' is torch.bfloat16, but precision='fp32' computes in fp32",
    "tied in the middle": "must name a parameter of the first layer (0)",
    "other values": "layers[0]: 'weight' is not the same on ranks 0 and 1",
    "other rate": "ranks differ: rank 0 has",
    "other knob": "ranks differ: rank 0 has",
    "unknown knob": "TypeError: parallelize() got an unexpected keyword argument 'tp'",
    "tuple": "layers[1]: returns tuple",
    "no layers": "layers=[]",
    "wrong width": "layers[0]: cannot be called",
    "too many ranks": "must be the number of ranks, 2",
    "small cap": "activation_cap=3: a unit of 4 microbatches in 2 chunks needs at least 5",
    "mesh and degree": "pp=2: the mesh has it, too",
    "mesh of another axis": "they must be named among",
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_wrong_call_is_one_error_on_every_rank(world: World, case: str) -> None:
    said = world.run(refused, case, size=2)
    expected = REFUSALS[case].replace("layers[0]: 'w", "layers[2]: 'w")
    assert all(expected in message for message in said), said
    assert all("\n" not in message for message in said)
    assert len(set(said)) == 1


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
