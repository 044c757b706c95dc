"""One process that trains uncut layers in a plain loop: what all else is compared with."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from zeropp.engine.evaluator import unchanged
from zeropp.engine.layers.chunk import seed_piece
from zeropp.engine.layers.values import (
    Value,
    cast,
    chosen,
    may_have_gradient,
    tensors_of,
    without_scalars,
)
from zeropp.engine.loss import Loss, Microbatches

# How far a step is from that of one process: by name, the L2 norm of the difference, and the size
# of its part along what was expected, both relative to that; infinite where it is not a number.
Distances = dict[str, tuple[float, float]]


@dataclass
class OneProcess:
    """``layers`` that are called one after another, and whose ``masters``, which are as many
    parameters in their order, an optimizer updates. Gradients come from one backward per
    microbatch and are added up in ``sums``, by default the masters' type. ``compute``: the type to
    which a layer's floating-point inputs are cast. ``seed``: of what layers draw. ``names``: of the
    keyword inputs that each layer takes."""

    layers: Sequence[nn.Module]
    masters: Sequence[nn.Parameter]
    loss: Loss
    sums: torch.dtype | None = None
    compute: torch.dtype | None = None
    seed: int | None = None
    names: Sequence[frozenset[str]] = ()

    def gradients(self, batch: Microbatches, step: int) -> Tensor:
        """Set the masters' ``grad`` to that of a whole batch; returns its loss."""
        pairs = self._filled()
        sums: dict[nn.Parameter, Tensor] = {}

        def add(loss: Tensor) -> None:
            loss.backward()  # type: ignore[no-untyped-call]
            for master, working in pairs:
                if working.grad is not None:
                    fresh, working.grad = working.grad.to(self.sums or master.dtype), None
                    sums[master] = sums[master] + fresh if master in sums else fresh

        mean, divisor = self._forward(batch, step, add)
        for master, _ in pairs:
            total = sums.get(master)
            master.grad = None if total is None else total.to(master.dtype) / divisor
        return mean

    @torch.no_grad()
    def evaluate(self, batch: Microbatches) -> Tensor:
        """The loss of a batch in evaluation mode; modes and numbers are as before."""
        self._filled()
        with unchanged(self.layers, batch.inputs[0].device):
            for part in nn.ModuleList(self.layers).modules():
                part.training = False
            return self._forward(batch, None, lambda _: None)[0]

    def _forward(
        self, batch: Microbatches, step: int | None, then: Callable[[Tensor], None]
    ) -> tuple[Tensor, Any]:
        """The loss of a batch, and by what those of its microbatches were divided,
        which go to ``then``. ``step``: by which drawing is seeded."""
        losses, counts = [], []
        for number, value in enumerate(batch.inputs):
            beside: list[Tensor] = []
            given: Value = value
            keywords = batch.keywords_of(number)
            for index, layer in enumerate(self.layers):
                if self.seed is not None and step is not None:
                    seed_piece(self.seed, step, number, index)
                own = chosen(keywords, self.names[index], self.compute) if keywords else {}
                output = layer(*cast(tensors_of(given), self.compute), **own)
                given, scalars = without_scalars(output)
                beside += [] if scalars is None else [scalars]
            loss, count = self.loss(given, batch, number)
            then(sum(beside, loss))
            losses.append(sum(beside, loss).detach())
            counts += [] if count is None else [count]
        divisor: Any = {"tokens": sum(counts), "mean": len(losses), "sum": 1}[self.loss.reduction]
        return torch.stack(losses).double().sum() / divisor, divisor

    @torch.no_grad()
    def _filled(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        """Masters with the parameters that layers compute with, which get their values."""
        pairs = list(zip(self.masters, parameters_of(self.layers).values(), strict=True))
        for master, working in pairs:
            working.data.copy_(master.data)
            working.grad = None
        return pairs


def parameters_of(layers: Iterable[nn.Module]) -> dict[str, nn.Parameter]:
    """The parameters of layers, each once, named ``{layer}.{name}``."""
    named = nn.ModuleList(layers).named_parameters()
    return dict(named)


def distances(
    found: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    floors: Mapping[str, float] = MappingProxyType({}),
) -> Distances:
    """How far each that there is of ``found``, real numbers, is from what was expected."""
    known: Distances = {}
    for name, one in found.items():
        b, far = wide(expected[name]).flatten(), apart(one, expected[name], floors.get(name, 0.0))
        along = abs(float((wide(one).flatten() - b) @ b)) / (float(b @ b) + 1e-60)
        known[name] = far, along if far < math.inf else far
    return known


def wide(one: Tensor) -> Tensor:
    """Its numbers in fp64 on the CPU."""
    return one.detach().cpu().to(torch.complex128 if one.is_complex() else torch.float64)


def apart(one: Tensor, other: Tensor, floor: float = 0.0) -> float:
    """The distance of two tensors over the size of the second and ``floor``; infinite where one has
    other infinite numbers than the other, or others that are not numbers."""
    if one.shape != other.shape:
        return math.inf
    if not may_have_gradient(other.dtype):
        return 0.0 if torch.equal(one.cpu(), other.cpu()) else math.inf
    a, b = wide(one), wide(other)
    finite = b.isfinite()
    if not (torch.equal(a.isfinite(), finite) and a[~finite].allclose(b[~finite], equal_nan=True)):
        return math.inf
    return float((a - b)[finite].norm() / (b[finite].norm() + floor + 1e-30))
