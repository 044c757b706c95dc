"""Models of unusual layers, their training in one process, and layers that are refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.gloo.cuts import Make
from tests.gloo.user_layers import (
    WIDTH,
    Attention,
    Checkpointed,
    Complex,
    Conjugates,
    Detached,
    Frozen,
    Given,
    GivesComplex,
    GivesParameter,
    Hooked,
    InnerGradient,
    Locked,
    PostHooked,
    Recurrent,
    Reused,
    SharedMemory,
    Sometimes,
    TakesComplex,
    TakesTwo,
    Transformed,
    TwoTypes,
    linear,
    spectral,
    wide,
)  # fmt: skip

ROWS, MICROBATCH, STEPS = 12, 2, 2
RATE = 0.1  # of plain SGD, whose steps are as wrong as a gradient is
LEAST_MOVE = 1e-4  # of each parameter with a gradient, at least a hundred times the tolerance


@dataclass(frozen=True)
class UserModel:
    """Layers; how far parameters may be from those of one process; a factor of weights, which
    keeps gradients from vanishing over many layers; and the parameters that never have a
    gradient, by ``{layer}.{name}``."""

    kinds: tuple[Make, ...]
    without_gradient: frozenset[str]
    tolerance: float = 1e-10
    scale: float = 1.0


def names(layer: int, *modules: str) -> set[str]:
    """The weight and the bias of linear layers inside a layer, or of the layer itself."""
    return {f"{layer}.{module}{kind}" for module in modules for kind in ("weight", "bias")}


# Each unusual layer stands where some topology cuts right before or behind it; the ones that hand
# several tensors on are cut apart, too.
MODELS = {
    "unusual": UserModel(
        (
            linear, Frozen, Reused, lambda: InnerGradient(False), lambda: InnerGradient(True),
            Hooked, Transformed, lambda: Checkpointed(True), lambda: Checkpointed(False), Attention,
            Recurrent, GivesParameter, TakesTwo, GivesComplex, Conjugates, TakesComplex, spectral,
            linear,
        ),
        frozenset({*names(1, "a."), "1.b.bias", *names(3, "a.")}),
        scale=2.0,
    ),
    "two types": UserModel(
        (linear, TwoTypes, linear, TwoTypes, TwoTypes, linear, linear, TwoTypes, linear),
        frozenset(),
        tolerance=1e-6,
    ),
    # Where gradients stop, always or for some rows.
    "stopping": UserModel(
        (linear, wide, Detached, wide, Sometimes, linear, wide, Sometimes, linear, linear),
        frozenset(names(0, "") | names(1, "") | names(2, "b.") | names(4, "b.") | names(7, "b.")),
    ),
}  # fmt: skip


def made(kinds: Sequence[Make], scale: float = 1.0) -> list[nn.Module]:
    """Layers of these kinds, equal on every rank, with weights larger than torch makes them."""
    torch.manual_seed(3)
    layers = [kind().double() for kind in kinds]
    if scale != 1.0:
        with torch.no_grad():
            for parameter in nn.ModuleList(layers).parameters():
                if parameter.dim() > 1:
                    parameter.mul_(scale)
    return layers


def data(step: int, tokens: bool = False) -> tuple[Tensor, Tensor]:
    """A global batch, in fp64."""
    generator = torch.Generator().manual_seed(step)
    inputs, targets = torch.randn(2, ROWS, WIDTH, generator=generator, dtype=torch.float64)
    return torch.arange(ROWS) % 7 if tokens else inputs, targets


def kinds_of(name: str, degrees: dict[str, Any]) -> tuple[Make, ...]:
    """The layers of a model that a topology can train as one process does."""
    left_out: set[Make] = set()
    if degrees.get("shard", 1) * degrees.get("replicate", 1) > 1:
        left_out.add(spectral)  # on every rank it would see that rank's rows alone
    if "recompute" in degrees:
        # Recomputed layers would see their rows twice; torch's transforms do not work inside of
        # torch's recomputation.
        left_out |= {spectral, Transformed}
    return tuple(kind for kind in MODELS[name].kinds if kind not in left_out)


@cache
def alone(name: str, kinds: tuple[Make, ...]) -> dict[str, Tensor]:
    """Parameters after some steps in one process. All that should have gradients have moved so far
    that a wrong gradient would be seen, and gradients stop for some rows but not for all."""
    model = nn.ModuleList(made(kinds, MODELS[name].scale))
    before = {key: value.detach().clone() for key, value in model.named_parameters()}
    branches = watched_branches(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for step in range(STEPS):
        optimizer.zero_grad()
        for x, y in zip(*(torch.split(part, MICROBATCH) for part in data(step)), strict=True):
            value: Any = x
            for layer in model:
                value = layer(*value) if isinstance(value, tuple) else layer(value)
            (F.mse_loss(value, y) * MICROBATCH / ROWS).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert all(taken == {True, False} for taken in branches)
    after = {key: value.detach() for key, value in model.named_parameters()}
    moves = {key: float((value - before[key]).abs().max()) for key, value in after.items()}
    without = without_gradient(name, kinds)
    assert {key for key, move in moves.items() if move == 0} == without
    assert {key for key, move in moves.items() if not move > LEAST_MOVE} == without
    return after


def watched_branches(model: nn.ModuleList) -> list[set[bool]]:
    """Of each layer that gives gradients for some rows only: whether its outputs have had one."""
    found = []
    for layer in model:
        if isinstance(layer, Sometimes):
            taken: set[bool] = set()
            layer.register_forward_hook(
                lambda _, given, got, taken=taken: taken.add(got.requires_grad)
            )
            found.append(taken)
    return found


def without_gradient(name: str, kinds: Sequence[Make]) -> set[str]:
    """The parameters that never have a gradient where some layers of a model are left out."""
    left = [number for number, kind in enumerate(MODELS[name].kinds) if kind in kinds]
    parts = [key.partition(".") for key in MODELS[name].without_gradient]
    return {f"{left.index(int(number))}.{rest}" for number, _, rest in parts}


def between(*kinds: Make) -> list[Make]:
    """Layers with a linear one on either side."""
    return [linear, *kinds, linear]


REFUSED: dict[str, tuple[list[Make], str]] = {
    "post hook": (between(PostHooked, linear), "1.a.bias: has a hook of register_post_accumulate"),
    "shared memory": (between(SharedMemory, linear), "layers[1]: 'b.weight' is in the same memory"),
    "complex": (between(Complex, linear), "1.scale: parameters of type torch.complex64 cannot be"),
    "max_norm": (
        [lambda: nn.Embedding(7, WIDTH, max_norm=1.0), linear, linear, linear],
        "layers[0]: its forward changes 'weight', which no rank would keep",
    ),
    "lazy": (between(lambda: nn.LazyLinear(WIDTH), linear), "layers[1]: 'weight' has no shape yet"),
    "dict": (
        between(Given, linear),
        "layers[1]: returns dict, but a layer must return a tensor or a tuple of tensors",
    ),
    "lock": (between(Locked, linear), "layers[1]: cannot be copied, but its sizes are found so"),
}
