"""Layers with several tensors between them, keyword inputs, dropout and two kinds of losses: on a
rank, and in one process to match."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import zeropp
from tests.gloo.differences import largest
from zeropp.engine.chunk import seed_piece
from zeropp.engine.values import chosen, keywords_of, tensors_of
from zeropp.train.parallel_model import ParallelModel

WIDTH, ROWS, MICROBATCH = 8, 12, 2
DEGREES = [
    {"pp": 2, "chunks": 2, "split_backward": False, "recompute": "full"},
    {"shard": 3, "chunks": 2, "unit": 1},
    {"pp": 2, "replicate": 2, "replicate_zero": 1},
    {"pp": 2, "shard": 2, "chunks": 2},
    {"pp": "auto", "shard": "auto", "replicate": "auto", "chunks": "auto", "unit": "auto",
     "recompute": "auto", "cluster": "a800"},
]  # fmt: skip


class Fork(nn.Module):
    """Gives two tensors with gradients, and one of whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = self.linear(x)
        return x, x.sin(), (x > 0).long().sum(-1)


class Both(nn.Module):
    """Takes three tensors and gives three; the second input of the last one goes unused."""

    def __init__(self, unused: bool = False) -> None:
        super().__init__()
        self.linear, self.unused = nn.Linear(WIDTH, WIDTH), unused
        self.embedding = nn.Embedding(WIDTH + 1, WIDTH)

    def forward(self, a: Tensor, b: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        found = torch.tanh(self.linear(a)) + self.embedding(counts)
        return found if self.unused else found + b, found * 0.5, counts


class Join(nn.Module):
    """Gives one tensor again."""

    def forward(self, a: Tensor, b: Tensor, counts: Tensor) -> Tensor:
        return a * counts[:, None].to(a.dtype)


class Masked(nn.Module):
    """Takes a mask by name, and is otherwise a layer with dropout."""

    def __init__(self, rate: float = 0.0) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(rate)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        dropped: Tensor = self.drop(self.linear(x).masked_fill(mask, 0.3))
        return dropped + x


class Wrapping(nn.Module):
    """Hands all that it takes to the layer inside, as ``torch.compile`` and other wrappers do."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.adapters = inner, nn.ModuleDict()

    def forward(self, *inputs: Tensor, **keywords: Tensor) -> Tensor:
        output: Tensor = self.inner(*inputs, **keywords)
        return output


class Placed(nn.Module):
    """Takes the mask's neighbour: positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(ROWS, WIDTH)

    def forward(self, x: Tensor, *, positions: Tensor) -> Tensor:
        embedded: Tensor = self.embedding(positions)
        return x + embedded


def linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


def label(degrees: dict[str, Any]) -> str:
    """A test's name."""
    return " ".join(f"{name}={value}" for name, value in degrees.items())


def ranks_of(degrees: dict[str, Any]) -> int:
    """Ranks of a case; four where the degrees are left open."""
    asked = [degrees.get(axis, 1) for axis in ("pp", "shard", "replicate")]
    return 4 if "auto" in asked else math.prod(asked)


KINDS: dict[str, list[Callable[[], nn.Module]]] = {
    "tuples": [Fork, Both, Both, lambda: Both(unused=True), Both, Join, linear],
    "keywords": [linear, Masked, Placed, lambda: Wrapping(Masked()), linear, Masked, linear],
    "dropout": [linear, lambda: Masked(0.4), linear, lambda: Masked(0.4), Placed, Masked, linear],
}


def mean_loss(output: Tensor, target: Tensor) -> Tensor:
    """In the type of the target, as torch 2.11 does not take two types."""
    return F.mse_loss(output.to(target.dtype), target)


def sum_loss(output: Tensor, target: Tensor, row_weight: Tensor) -> Tensor:
    """Weighted by a keyword input."""
    return ((output - target).square().mean(-1) * row_weight).sum()


LOSSES: dict[str, Callable[..., Tensor]] = {"mean": mean_loss, "sum": sum_loss}


class Batch:
    """A global batch of a step, in fp64, with keyword inputs where layers or loss name them."""

    def __init__(self, kind: str, reduction: str, step: int, rows: int = ROWS) -> None:
        generator = torch.Generator().manual_seed(step)
        self.inputs, self.targets = torch.randn(
            2, rows, WIDTH, generator=generator, dtype=torch.float64
        )
        self.keywords: dict[str, Tensor] = {}
        if kind != "tuples":
            self.keywords["mask"] = torch.rand(rows, WIDTH, generator=generator) < 0.3
            self.keywords["positions"] = torch.randperm(ROWS, generator=generator)[:rows]
        if reduction == "sum":
            self.keywords["row_weight"] = torch.rand(rows, generator=generator).double()

    def part(self, rows: slice) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """Some of its rows."""
        keywords = {name: value[rows] for name, value in self.keywords.items()}
        return self.inputs[rows], self.targets[rows], keywords


class Alone:
    """The same layers in one process, microbatch by microbatch."""

    def __init__(self, kind: str, reduction: str) -> None:
        self.layers = nn.ModuleList(copy.deepcopy(made(kind)))
        self.kind, self.reduction = kind, reduction
        self.optimizer = torch.optim.AdamW(self.layers.parameters(), lr=1e-2)

    def loss(self, batch: Batch, rows: slice, seed: tuple[int, int] | None = None) -> Tensor:
        """The loss of some rows; with the step's and the microbatch's number, draws are seeded."""
        _, targets, keywords = batch.part(rows)
        function = LOSSES[self.reduction]
        named = chosen(keywords, keywords_of(function))
        return function(self._output(batch, rows, seed), targets, **named)

    def _output(self, batch: Batch, rows: slice, seed: tuple[int, int] | None = None) -> Any:
        inputs, _, keywords = batch.part(rows)
        value: Any = inputs
        for index, layer in enumerate(self.layers):
            if seed is not None:
                seed_piece(0, *seed, index)
            value = layer(*tensors_of(value), **chosen(keywords, keywords_of(layer)))
        return value

    def train(self, step: int) -> float:
        """One step; gives its loss."""
        self.optimizer.zero_grad()
        batch, total = Batch(self.kind, self.reduction, step), 0.0
        count = ROWS // MICROBATCH if self.reduction == "mean" else 1
        for number in range(ROWS // MICROBATCH):
            rows = slice(number * MICROBATCH, (number + 1) * MICROBATCH)
            loss = self.loss(batch, rows, (step, number)) / count
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        self.optimizer.step()
        return total

    @torch.no_grad()
    def output(self, batch: Batch) -> Any:
        """What the last layer gives for a whole batch, in evaluation mode."""
        self.layers.eval()
        value = self._output(batch, slice(None))
        self.layers.train()
        return value

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> float:
        """The loss of a whole batch at once, in evaluation mode."""
        self.layers.eval()
        loss = float(self.loss(batch, slice(None)))
        self.layers.train()
        return loss


@dataclass(frozen=True)
class Course:
    """A training in one process: its losses, those of ``evaluated`` batches before each step, and
    the parameters after the last step."""

    kind: str
    reduction: str
    losses: list[float]
    evaluations: list[float]
    parameters: dict[str, Tensor]


def evaluated(kind: str, reduction: str, step: int) -> Batch:
    """The seven rows that are evaluated before a step."""
    return Batch(kind, reduction, 100 + step, rows=7)


@cache
def course_of(kind: str, reduction: str, steps: int) -> Course:
    """What every topology is compared with, so that it is computed once and sent to the ranks."""
    alone, losses, evaluations = Alone(kind, reduction), [], []
    for step in range(steps):
        evaluations.append(alone.evaluate(evaluated(kind, reduction, step)))
        losses.append(alone.train(step))
    parameters = {name: value.detach() for name, value in alone.layers.named_parameters()}
    return Course(kind, reduction, losses, evaluations, parameters)


def made(kind: str) -> list[nn.Module]:
    """Layers of a kind, equal on every rank."""
    torch.manual_seed(5)
    return [make().double() for make in KINDS[kind]]


def parallel(kind: str, reduction: str, degrees: dict[str, Any]) -> ParallelModel:
    """Layers of a kind on this rank."""
    inputs, _, keywords = Batch(kind, reduction, 0).part(slice(MICROBATCH))
    return zeropp.parallelize(
        made(kind),
        LOSSES[reduction],
        sample=inputs,
        sample_keywords=keywords,
        global_batch=ROWS,
        loss_reduction=reduction,  # type: ignore[arg-type]
        optimizer=lambda groups: torch.optim.AdamW(groups["all"], lr=1e-2),
        **degrees,
    )


def worst(model: ParallelModel, expected: Mapping[str, Tensor]) -> float:
    """Largest difference of this rank's parameters from one process's."""
    found = dict(model.full_parameters())
    assert found
    pairs = [(value, expected[name].float()) for name, value in found.items()]
    return largest(float((ours - theirs).abs().max()) for ours, theirs in pairs)
