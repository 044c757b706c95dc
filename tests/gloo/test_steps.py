"""Several tensors between layers, keyword inputs, sums as losses, and evaluation: each against one
process in fp64."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import zeropp
from tests.gloo.world import World
from zeropp.engine.randomness import seed_piece
from zeropp.engine.values import chosen, keywords_of, tensors_of
from zeropp.parallel_model import ParallelModel

WIDTH, ROWS, MICROBATCH = 8, 24, 2
DEGREES = [
    {"pp": 2, "chunks": 2},
    {"pp": 2, "shard": 2, "chunks": 2, "split_backward": False, "recompute": "full"},
    {"shard": 3, "chunks": 2, "unit": 2},
    {"pp": 3, "replicate": 2, "replicate_zero": 1},
    {"pp": 2, "shard": 2, "chunks": 2, "stage_style": "v"},
]


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


class Placed(nn.Module):
    """Takes the mask's neighbour: positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(ROWS, WIDTH)

    def forward(self, x: Tensor, *, positions: Tensor) -> Tensor:
        placed: Tensor = self.embedding(positions)
        return x + placed


def linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


def label(degrees: dict[str, Any]) -> str:
    """A test's name."""
    return " ".join(f"{name}={value}" for name, value in degrees.items())


KINDS: dict[str, list[Callable[[], nn.Module]]] = {
    "tuples": [Fork, Both, Both, lambda: Both(unused=True), Both, Join, linear],
    "keywords": [linear, Masked, Placed, Masked, linear, Masked, linear],
    "dropout": [linear, lambda: Masked(0.4), linear, lambda: Masked(0.4), Placed, Masked, linear],
}


def mean_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target)


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

    def part(self, rows: slice) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
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
        inputs, targets, keywords = batch.part(rows)
        value: Any = inputs
        for index, layer in enumerate(self.layers):
            if seed is not None:
                seed_piece(0, *seed, index)
            value = layer(*tensors_of(value), **chosen(keywords, keywords_of(layer)))
        function = LOSSES[self.reduction]
        return function(value, targets, **chosen(keywords, keywords_of(function)))

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
    def evaluate(self, batch: Batch) -> float:
        """The loss of a whole batch at once, in evaluation mode."""
        self.layers.eval()
        loss = float(self.loss(batch, slice(None)))
        self.layers.train()
        return loss


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


def worst(model: ParallelModel, expected: nn.Module) -> float:
    """Largest difference of this rank's parameters from one process's."""
    theirs = dict(expected.named_parameters())
    found = dict(model.full_parameters())
    assert found
    return max(float((value - theirs[name].float()).abs().max()) for name, value in found.items())


def train(degrees: dict[str, Any], kinds: Sequence[tuple[str, str]]) -> list[tuple[float, float]]:
    """Largest errors of loss and parameters after two steps, for every kind of layers and loss."""
    errors = []
    for kind, reduction in kinds:
        alone = Alone(kind, reduction)
        with parallel(kind, reduction, degrees) as model:
            apart = 0.0
            for step in range(2):
                inputs, targets, keywords = Batch(kind, reduction, step).part(model.rows)
                result = model.train_step(inputs, targets, **keywords)
                expected = alone.train(step)
                apart = max(apart, abs(result.loss - expected) / expected)
            errors.append((apart, worst(model, alone.layers)))
    return errors


@pytest.mark.parametrize(
    "degrees", DEGREES, ids=lambda d: " ".join(f"{k}={v}" for k, v in d.items())
)
def test_steps_are_those_of_one_process(world: World, degrees: dict[str, Any]) -> None:
    kinds = [("tuples", "mean"), ("keywords", "mean"), ("keywords", "sum"), ("dropout", "mean")]
    size = degrees.get("pp", 1) * degrees.get("shard", 1) * degrees.get("replicate", 1)
    for errors in world.run(train, degrees, kinds, size=size):
        assert len(errors) == len(kinds)
        for loss, parameters in errors:
            assert loss < 1e-12
            assert parameters < 1e-6  # they come as fp32


def uneven_rows(model: ParallelModel) -> slice:
    """This rank's part of seven rows: two, five, or none where there are three such ranks."""
    if model.data_parallel_size == 1:
        return slice(0, 7)
    parts = {0: slice(0, 2), model.data_parallel_size - 1: slice(2, 7)}
    return parts.get(model.data_parallel_rank, slice(0, 0))


def evaluate(
    degrees: dict[str, Any], kinds: Sequence[tuple[str, str]]
) -> list[tuple[float, float]]:
    """Largest error of the losses of uneven batches before and between steps, and of the
    parameters that come of the steps, for every kind of layers and loss."""
    errors = []
    for kind, reduction in kinds:
        alone = Alone(kind, reduction)
        with parallel(kind, reduction, degrees) as model:
            apart = 0.0
            for step in range(3):
                batch = Batch(kind, reduction, 100 + step, rows=7)
                inputs, targets, keywords = batch.part(uneven_rows(model))
                drawn = torch.get_rng_state()
                loss = model.eval_step(inputs, targets, **keywords)
                assert torch.equal(drawn, torch.get_rng_state())
                chunks = model.engine.chunks.values()
                assert not any(chunk.shards.gathered_bytes() for chunk in chunks)
                apart = max(apart, abs(loss / alone.evaluate(batch) - 1))
                inputs, targets, keywords = Batch(kind, reduction, step).part(model.rows)
                model.train_step(inputs, targets, **keywords)
                alone.train(step)
            errors.append((apart, worst(model, alone.layers)))
    return errors


@pytest.mark.parametrize(
    "degrees", DEGREES, ids=lambda d: " ".join(f"{k}={v}" for k, v in d.items())
)
def test_evaluation_is_that_of_one_process_and_leaves_nothing(
    world: World, degrees: dict[str, Any]
) -> None:
    kinds = [("tuples", "mean"), ("keywords", "sum"), ("dropout", "mean")]
    size = degrees.get("pp", 1) * degrees.get("shard", 1) * degrees.get("replicate", 1)
    for errors in world.run(evaluate, degrees, kinds, size=size):
        assert len(errors) == len(kinds)
        for loss, parameters in errors:
            assert loss < 1e-12
            assert parameters < 1e-6


def wrong_calls() -> dict[str, str]:
    """What wrong keyword inputs and batches say."""
    found = {}

    def note(name: str, call: Callable[[], object]) -> None:
        try:
            call()
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"

    def build(keywords: dict[str, Tensor]) -> None:
        inputs = Batch("keywords", "mean", 0).inputs[:MICROBATCH]
        zeropp.parallelize(
            made("keywords"), mean_loss, sample=inputs, global_batch=ROWS, pp=2,
            sample_keywords=keywords,
        )  # fmt: skip

    _, _, keywords = Batch("keywords", "mean", 0).part(slice(MICROBATCH))
    note("missing", lambda: build({"positions": keywords["positions"]}))
    note("nobody's", lambda: build({**keywords, "padding": keywords["mask"]}))
    note("one row", lambda: build({**keywords, "mask": keywords["mask"][:1]}))
    model = parallel("keywords", "mean", {"pp": 2})
    inputs, targets, keywords = Batch("keywords", "mean", 0).part(slice(None))
    note("left out", lambda: model.train_step(inputs, targets, mask=keywords["mask"]))
    short = {**keywords, "mask": keywords["mask"][:4]}
    note("short", lambda: model.train_step(inputs, targets, **short))
    note("uneven", lambda: model.eval_step(inputs, targets, **short))
    part = slice(0, 4 + 2 * dist.get_rank())
    inputs, targets, keywords = Batch("keywords", "mean", 0).part(part)
    note("ranks differ", lambda: model.eval_step(inputs, targets, **keywords))
    empty = inputs[:0], targets[:0], {name: value[:0] for name, value in keywords.items()}
    note("no rows", lambda: model.eval_step(empty[0], empty[1], **empty[2]))
    return found


MESSAGES = {
    "missing": "InfeasibleError: layers[1]: cannot be called with the output of the layer before",
    "nobody's": "InfeasibleError: sample_keywords: 'padding' is named by no layer's forward",
    "one row": "InfeasibleError: sample_keywords: 'mask' has shape (1, 8), but one row",
    "left out": "TypeError: keyword inputs are ['mask'], but parallelize was told of",
    "short": "ValueError: mask: 4 rows, but this rank trains on 24 rows",
    "uneven": "ValueError: eval_step: numbers of rows differ",
    "ranks differ": "ValueError: eval_step: ranks of one pipeline were given different rows",
    "no rows": "ValueError: eval_step: no rank was given any rows",
}


def test_wrong_keywords_and_rows_are_one_error_on_every_rank(world: World) -> None:
    first, second = world.run(wrong_calls, size=2)
    assert first == second
    assert set(first) == set(MESSAGES)
    for name, message in MESSAGES.items():
        assert first[name].startswith(message), first[name]
