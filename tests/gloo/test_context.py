"""Sequences that ranks divide: training, evaluation and outputs against one process in fp64."""

from __future__ import annotations

import random
from functools import cache
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeropp
from baselines.model import build_model, cross_entropy, initial_std
from tests.gloo.models import apart, largest
from tests.gloo.world import World
from zeropp.engine.chunk import seed_piece
from zeropp.train.parallel_model import ParallelModel
from zeropp.types.shape import ModelShape

ROWS, LENGTH, STEPS, SEED = 8, 12, 2, 5
SGD = zeropp.OptimizerConfig("sgd", lr=0.5)
GPT = ModelShape(
    name="small", family="gpt", layers=4, hidden=24, heads=12, kv_heads=12, ffn=32, vocab=32,
    seq=LENGTH, dropout=0.1,
)  # fmt: skip
LLAMA = ModelShape(
    name="small", family="llama", layers=4, hidden=48, heads=12, kv_heads=2, ffn=32, vocab=32,
    seq=LENGTH, tied_embeddings=True,
)  # fmt: skip
SHAPES = {"gpt": GPT, "llama": LLAMA}


def topology(seed: int) -> dict[str, Any]:
    """Random keywords of ``parallelize`` for at most eight ranks."""
    draw = random.Random(seed)
    degrees = ("pp", "shard", "context", "replicate")
    sizes = [(1, 2, 3), (1, 2), (2, 3, 4), (1, 2)]
    drawn = [draw.choice(size) for size in sizes]
    while prod(drawn) > 8:
        drawn = [draw.choice(size) for size in sizes]
    return {
        **dict(zip(degrees, drawn, strict=True)),
        "chunks": draw.randint(1, 2),
        "microbatch_size": draw.choice([1, 2]),
        "recompute": draw.choice(["none", "selective", "full"]),
        "replicate_zero": draw.randint(0, 1),
        "placement": draw.choice(["dp_inner", "pp_inner"]),
        "reduce_every": draw.choice(["unit", "step"]),
        "split_backward": draw.random() < 0.7,
    }


def made(family: str) -> list[nn.Module]:
    with initial_std(0.5):
        return list(build_model(SHAPES[family], SEED).double())


def data(step: int, rows: int = ROWS) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(32, (2, rows, LENGTH), generator=generator)


Course = tuple[list[tuple[float, float]], dict[str, Tensor], Tensor]


@cache
def alone(family: str, size: int) -> Course:
    """Losses and evaluations, the parameters behind the last step, and what the model then gives,
    in one process with microbatches of so many rows."""
    model = nn.Sequential(*made(family))
    numbers = []
    optimizer = torch.optim.SGD(model.parameters(), lr=SGD.lr)
    for step in range(STEPS):
        model.eval()
        with torch.no_grad():
            evaluated = float(cross_entropy(model(data(100 + step)[0]), data(100 + step)[1]))
        model.train()
        optimizer.zero_grad()
        total = 0.0
        parts = zip(*(part.split(size) for part in data(step)), strict=True)
        for number, (value, targets) in enumerate(parts):
            for index, layer in enumerate(model):
                seed_piece(SEED, step, number, index)
                value = layer(value)
            loss = cross_entropy(value, targets) * size / ROWS
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        optimizer.step()
        numbers.append((total, evaluated))
    model.eval()
    named = dict(model.named_parameters(remove_duplicate=False))
    parameters = {name: one.detach() for name, one in named.items()}
    return numbers, parameters, model(data(7)[0]).detach()


def parallel(family: str, **degrees: Any) -> ParallelModel:
    shape = SHAPES[family]
    tied = ((0, "tokens.weight"), (shape.num_pieces - 1, "output.weight"))
    return zeropp.parallelize(
        made(family), cross_entropy, sample=data(0)[0], global_batch=ROWS, optimizer=SGD,
        tied=tied if shape.tied_embeddings else None, dropout_seed=SEED, **degrees,
    )  # fmt: skip


def errors(family: str, seed: int, expected: Course) -> tuple[float, float, float]:
    """How far numbers, parameters and outputs of this rank are from those of one process."""
    numbers, parameters, output = expected
    with parallel(family, **topology(seed)) as model:
        relative = []
        for step, theirs in enumerate(numbers):
            evaluated = model.eval_step(*data(100 + step)[:, model.rows])
            ours = float(model.train_step(*data(step)[:, model.rows]).loss), evaluated
            relative += [abs(a / b - 1) for a, b in zip(ours, theirs, strict=True)]
        given = model.forward_only(data(7)[0][model.rows])
        assert isinstance(given, Tensor)
        own = dict(model.full_parameters())
    far = float((given - output[model.rows]).abs().max())
    return largest(relative), apart(own, parameters), far


@pytest.mark.parametrize("family", SHAPES)
@pytest.mark.parametrize("seed", range(3))
def test_random_topologies_are_one_process(world: World, family: str, seed: int) -> None:
    """Losses in fp64; the loss and rotary angles of these models are fp32, and so are copies of
    parameters."""
    drawn = topology(seed)
    expected = alone(family, drawn["microbatch_size"])
    ranks = prod(drawn[axis] for axis in ("pp", "shard", "context", "replicate"))
    for numbers, parameters, output in world.run(errors, family, seed, expected, size=ranks):
        assert numbers < 1e-6, (numbers, drawn)
        assert parameters < 1e-6, (parameters, drawn)
        assert output < 1e-5, (output, drawn)
