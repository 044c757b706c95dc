"""Sequences that ranks divide: training, evaluation and outputs against one process in fp64."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache, partial
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import zeropp
from baselines.model import build_model, cross_entropy, initial_std
from tests.gloo.models import apart, error_of, largest
from tests.gloo.world import World, on_ranks
from zeropp.engine.layers.chunk import seed_piece
from zeropp.train.parallel_model import ParallelModel
from zeropp.types.shape import ModelShape

ROWS, LENGTH, LONG, STEPS, SEED = 8, 12, 96, 2, 5
SGD = zeropp.OptimizerConfig("sgd", lr=0.5)
GPT = ModelShape(
    name="small", family="gpt", layers=4, hidden=24, heads=12, kv_heads=12, ffn=32, vocab=32,
    seq=LONG, dropout=0.1,
)  # fmt: skip
LLAMA = ModelShape(
    name="small", family="llama", layers=4, hidden=48, heads=12, kv_heads=2, ffn=32, vocab=32,
    seq=LONG, tied_embeddings=True,
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
        "recompute": draw.choice(["none", "selective", "mlp", "full"]),
        "replicate_zero": draw.randint(0, 1),
        "placement": draw.choice(["dp_inner", "pp_inner"]),
        "reduce_every": draw.choice(["unit", "step"]),
        "split_backward": draw.random() < 0.7,
    }


def made(family: str) -> list[nn.Module]:
    with initial_std(0.5):
        return list(build_model(SHAPES[family], SEED).double())


def data(step: int, length: int = LENGTH) -> Tensor:
    return torch.randint(32, (2, ROWS, length), generator=torch.Generator().manual_seed(step))


Course = tuple[list[tuple[float, float]], dict[str, Tensor], Tensor]


@cache
def alone(family: str, size: int, length: int = LENGTH) -> Course:
    """Losses and evaluations, the parameters behind the last step, and what the model then gives,
    in one process with microbatches of this many rows."""
    model = nn.Sequential(*made(family))
    numbers = []
    optimizer = torch.optim.SGD(model.parameters(), lr=SGD.lr)
    for step in range(STEPS):
        model.eval()
        with torch.no_grad():
            inputs, targets = data(100 + step, length)
            evaluated = float(cross_entropy(model(inputs), targets))
        model.train()
        optimizer.zero_grad()
        total = 0.0
        parts = zip(*(part.split(size) for part in data(step, length)), strict=True)
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
    return numbers, parameters, model(data(7, length)[0]).detach()


def parallel(family: str, length: int = LENGTH, **degrees: Any) -> ParallelModel:
    shape = SHAPES[family]
    tied = ((0, "tokens.weight"), (shape.num_pieces - 1, "output.weight"))
    return zeropp.parallelize(
        made(family), cross_entropy, sample=data(0, length)[0], global_batch=ROWS, optimizer=SGD,
        tied=tied if shape.tied_embeddings else None, dropout_seed=SEED, **degrees,
    )  # fmt: skip


def errors(family: str, seed: int, length: int, expected: Course) -> tuple[float, float, float]:
    """How far numbers, parameters and outputs of this rank are from those of one process."""
    numbers, parameters, output = expected
    with parallel(family, length, **topology(seed)) as model:
        relative = []
        for step, theirs in enumerate(numbers):
            evaluated = model.eval_step(*data(100 + step, length)[:, model.rows])
            ours = float(model.train_step(*data(step, length)[:, model.rows]).loss), evaluated
            relative += [abs(a / b - 1) for a, b in zip(ours, theirs, strict=True)]
        given = model.forward_only(data(7, length)[0][model.rows])
        assert isinstance(given, Tensor)
        own = dict(model.full_parameters())
    far = float((given - output[model.rows]).abs().max())
    return largest(relative), apart(own, parameters), far


@pytest.mark.parametrize(
    ("family", "seed", "length"),
    [("gpt", 0, LENGTH), ("gpt", 5, LONG), ("llama", 5, LONG), ("llama", 7, LENGTH)],
)
def test_random_topologies_are_one_process(
    world: World, family: str, seed: int, length: int
) -> None:
    """Losses in fp64; the loss and rotary angles of these models are fp32, and so are copies of
    parameters."""
    drawn = topology(seed)
    expected = alone(family, drawn["microbatch_size"], length)
    ranks = prod(drawn[axis] for axis in ("pp", "shard", "context", "replicate"))
    for numbers, parameters, output in world.run(
        errors, family, seed, length, expected, size=ranks
    ):
        assert numbers < 1e-6, (numbers, drawn)
        assert parameters < 1e-6, (parameters, drawn)
        assert output < 1e-5, (output, drawn)


class Own(nn.Module):
    """A layer that mixes tokens in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.linear = way, nn.Linear(24, 24)
        self.convolution = nn.Conv1d(24, 24, 3, padding=1)
        self.table = nn.Embedding(LENGTH, 24)

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "positions":
            return x + self.table(torch.arange(x.shape[1]))  # type: ignore[no-any-return]
        if self.way == "convolution":
            return x + self.convolution(x.transpose(1, 2)).transpose(1, 2)  # type: ignore[no-any-return]
        if self.way == "late":
            return x + x.mean(1, keepdim=True) if x.shape[1] > LONG else x
        if self.way in DRAWS:
            return DRAWS[self.way](x)
        rows = len(x)
        if self.way == "windows":
            x = x.reshape(-1, min(x.shape[1], 1024), 24)
        q = self.linear(x).unflatten(-1, (4, 6)).transpose(1, 2)
        if self.way == "scores":
            return x + ((q @ q.mT).softmax(-1) @ q).transpose(1, 2).flatten(2)  # type: ignore[no-any-return]
        drop = 0.1 if self.way == "dropout" else 0.0
        mask = torch.ones(x.shape[1], x.shape[1]).tril().bool() if self.way == "mask" else None
        mixed = F.scaled_dot_product_attention(q, q, q, attn_mask=mask, dropout_p=drop)
        return (x + mixed.transpose(1, 2).flatten(2)).reshape(rows, -1, 24)


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "noise": lambda x: x + torch.randn_like(x),
    "torch": lambda x: torch.dropout(x, 0.1, True),
    "alpha": lambda x: F.alpha_dropout(x, 0.1, True),
    "channels": lambda x: F.dropout1d(x, 0.1),
}
LENGTHS = {"late": 2 * LONG, "windows": 4096}
REFUSED = {
    "positions": "layers[1]: gives something else for a slice of a sequence than for all of it",
    "convolution": "layers[1]: gives something else for a slice of a sequence than for all of it",
    "scores": "layers[1]: gives something else for a slice of a sequence than for all of it",
    "mask": "a layer makes a mask [6, 6] of its slice of 6 tokens",
    "dropout": "attention drops weights (dropout_p=0.1)",
    "late": "layers[1]: gives something else for a slice of a sequence than for all of it",
    "windows": "attention is over 1024 tokens, but a slice of a sequence has 2048",
    "noise": "layers[1]: aten.randn_like.default draws the same numbers for every slice",
    "torch": "layers[1]: aten.bernoulli_.float draws the same numbers for every slice",
    "alpha": "layers[1]: aten.bernoulli_.float draws the same numbers for every slice",
    "channels": "layers[1]: aten.bernoulli_.float draws the same numbers for every slice",
    "weighted": "loss_fn: is not what loss_reduction='mean' says of rows",
    "shift": "loss_fn: gives",
    "length": "must divide among context=5 ranks, but inputs are (1, 12)",
    "": "",
}


def shifted(logits: Tensor, targets: Tensor) -> Tensor:
    """A loss that shifts labels itself, so that one of them is in the next slice."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten())


def weighted(logits: Tensor, targets: Tensor) -> Tensor:
    """A mean over tokens; some count more, and alike in all rows' slices."""
    counts = (targets % 7 == 0) * 8.0 + 1
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return (losses * counts.flatten()).sum() / counts.sum()


@on_ranks(2)
def test_what_would_be_wrong_is_refused() -> None:
    for way, words in REFUSED.items():
        tokens, targets = data(0, LENGTHS.get(way, LENGTH))
        torch.manual_seed(0)
        layers = [nn.Embedding(32, 24), Own(way), nn.Linear(24, 32)]
        loss = {"shift": shifted, "weighted": weighted}.get(way, cross_entropy)
        given: dict[str, Any] = {"sample": tokens[:1], "context": {"length": 5}.get(way, 2)}
        said = error_of(partial(step_of, layers, loss, tokens, targets, **given))
        assert said == "" if not words else words in said, (way, said)


def step_of(layers: Any, loss: Any, tokens: Tensor, targets: Tensor, **given: Any) -> None:
    """Build a model, and train a step."""
    with zeropp.parallelize(layers, loss, global_batch=ROWS, **given) as model:
        model.train_step(tokens[model.rows], targets[model.rows])


def resumed(folder: str, expected: Course) -> float:
    """How far parameters are from those of one process, if each step runs in another topology."""
    for step, degrees in enumerate([{"pp": 2, "context": 2}, {"context": 4}, {"shard": 4}]):
        with parallel("llama", microbatch_size=2, **degrees) as model:
            if step:
                model.load(folder)
            if step < STEPS:
                model.train_step(*data(step)[:, model.rows])
                model.save(folder)
                continue
            whole = model.full_state_dict()
            return apart(whole, expected[1]) if whole else 0.0
    raise AssertionError


def test_a_run_goes_on_with_another_context(world: World, tmp_path: Path) -> None:
    assert 0 < largest(world.run(resumed, str(tmp_path / "step"), alone("llama", 2), size=4)) < 1e-6
