"""``train_step`` and ``eval_step`` in turn, against one process in fp64: layers with several
tensors between them, keyword inputs, dropout, and sums as losses; wrong calls; number
types; parameters of linear layers, ties and norms; and sequences that ranks divide."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import cache, partial
from math import prod
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

import zeropp
from baselines.model import build_model, cross_entropy, initial_std
from tests.gloo.layers import WIDTH, Kind, One, linear
from tests.gloo.models import (
    KINDS,
    MICROBATCH,
    RATE,
    Batch,
    Course,
    apart,
    batch_of,
    built,
    course_alone,
    course_of,
    data,
    error_of,
    largest,
    ranks_of,
    seeded,
    steps,
    trained_alone,
    with_keywords,
)
from tests.gloo.world import World, on_ranks
from zeropp.engine.settings import Settings
from zeropp.train.parallel_model import ParallelModel
from zeropp.train.stages import check_sizes
from zeropp.types.layout import InfeasibleError
from zeropp.types.shape import ModelShape

DEGREES: list[dict[str, Any]] = [
    {"pp": 2, "chunks": 2, "split_backward": False, "recompute": "full"},
    {"shard": 3, "chunks": 2, "unit": 1},
    {"pp": 2, "replicate": 2, "replicate_zero": 1},
    {"pp": 2, "shard": 2, "chunks": 2},
    dict.fromkeys(("pp", "shard", "replicate", "chunks", "unit", "recompute"), "auto")
    | {"cluster": "a800"},
]


def uneven_rows(model: ParallelModel) -> slice:
    """This rank's part of seven rows: two, five, or none where there are three such ranks."""
    if model.data_parallel_size == 1:
        return slice(0, 7)
    parts = {0: slice(0, 2), model.data_parallel_size - 1: slice(2, 7)}
    return parts.get(model.data_parallel_rank, slice(0, 0))


def check_outputs(model: ParallelModel, batch: Batch, expected: Tensor) -> None:
    """An evaluation must give what it is asked for of this rank's rows."""
    rows = uneven_rows(model)
    inputs, targets, keywords = batch.part(rows)
    loss, less = model.eval_step(
        inputs, targets, outputs=lambda output: (output.argmax(-1), output[:, 0]), **keywords
    )
    ours = expected[rows]
    assert torch.equal(less[0], ours.argmax(-1))
    assert less[1].shape == ours[:, 0].shape
    assert loss == model.eval_step(inputs, targets, **keywords)


def errors_of(model: ParallelModel, course: Course) -> tuple[float, float, float, float]:
    """The largest errors of the losses and of the outputs of uneven batches before and between
    steps, of the losses of the steps, and of the parameters that come of them."""
    evaluation_errors, output_errors, step_errors = [], [0.0], []
    for step, batch in enumerate(course.evaluated):
        rows = uneven_rows(model)
        inputs, targets, keywords = batch.part(rows)
        drawn = torch.get_rng_state()
        loss = model.eval_step(inputs, targets, **keywords)
        given, expected = model.forward_only(inputs, **keywords), course.outputs[step][rows]
        assert torch.equal(drawn, torch.get_rng_state())
        flats = (flat for flat in model.engine.flats if not flat._resident)
        assert not any(flat._storage.nbytes() for flat in flats)
        assert isinstance(given, Tensor)
        assert given.shape == expected.shape
        output_errors += (given - expected).abs().flatten().tolist()
        evaluation_errors.append(abs(loss / course.evaluations[step] - 1))
        inputs, targets, keywords = course.batches[step].part(model.rows)
        loss = float(model.train_step(inputs, targets, **keywords).loss)
        step_errors.append(abs(loss / course.losses[step] - 1))
    parameter_error = apart(dict(model.full_parameters()), course.parameters)
    return largest(evaluation_errors), largest(output_errors), largest(step_errors), parameter_error


def train_and_evaluate(
    degrees: dict[str, Any], courses: Mapping[tuple[str, str], Course]
) -> list[tuple[float, float, float, float]]:
    """The errors of every course."""
    errors = []
    for (kind, reduction), course in courses.items():
        with with_keywords(kind, reduction, degrees) as model:
            check_outputs(model, course.evaluated[0], course.outputs[0])
            errors.append(errors_of(model, course))
    return errors


@pytest.mark.parametrize("degrees", DEGREES, ids=str)
def test_steps_and_evaluations_are_those_of_one_process(
    world: World, degrees: dict[str, Any]
) -> None:
    kinds = [("tuples", "mean"), ("keywords", "sum"), ("dropout", "mean")]
    courses = {one: course_of(*one, 2) for one in kinds}
    for errors in world.run(train_and_evaluate, degrees, courses, size=ranks_of(degrees)):
        assert len(errors) == len(kinds)
        for *numbers, parameters in errors:
            assert largest(numbers) < 1e-12
            assert parameters < 1e-6  # they come as fp32


def wrong_calls() -> dict[str, str]:
    """What wrong keyword inputs and batches say."""
    whole = batch_of("keywords", "mean", 0)
    inputs, targets, keywords = whole.part(slice(None))
    first, _, given = whole.part(slice(MICROBATCH))

    def build(more: dict[str, Tensor]) -> Callable[[], object]:
        return lambda: built(seeded(KINDS["keywords"]), sample=first, sample_keywords=more, pp=2)

    model = with_keywords("keywords", "mean", {"pp": 2})
    short = {**keywords, "mask": keywords["mask"][:4]}
    x, y, more = whole.part(slice(0, 4 + 2 * dist.get_rank()))
    none, no_targets, nothing = whole.part(slice(0, 0))
    calls: dict[str, Callable[[], object]] = {
        "missing": build({"positions": given["positions"]}),
        "nobody's": build({**given, "padding": given["mask"]}),
        "a step's own": build({**given, "outputs": given["mask"]}),
        "one row": build({**given, "mask": given["mask"][:1]}),
        "left out": lambda: model.train_step(inputs, targets, mask=keywords["mask"]),
        "short": lambda: model.train_step(inputs, targets, **short),
        "uneven": lambda: model.eval_step(inputs, targets, **short),
        "ranks differ": lambda: model.eval_step(x, y, **more),
        "no rows": lambda: model.eval_step(none, no_targets, **nothing),
        "a dict": lambda: model.forward_only(
            inputs,
            outputs=lambda output: {"output": output},  # type: ignore[arg-type, return-value]
            **keywords,
        ),
    }
    return {name: error_of(call) for name, call in calls.items()}


MESSAGES = {
    "missing": "InfeasibleError: layers[1]: cannot be called with the output of the layer before",
    "nobody's": "InfeasibleError: sample_keywords: 'padding' is named by no layer's forward",
    "a step's own": "InfeasibleError: sample_keywords: 'outputs' is an argument of every",
    "one row": "InfeasibleError: sample_keywords: 'mask' has shape (1, 8), but one row",
    "left out": "TypeError: keyword inputs are ['mask'], but parallelize got",
    "short": "ValueError: mask: 4 rows, but this rank trains on 12 rows",
    "uneven": "ValueError: inputs: numbers of rows differ",
    "ranks differ": "RowsError: eval_step: ranks of one pipeline were given different rows",
    "no rows": "RowsError: inputs: no rank was given any rows",
    "a dict": "InfeasibleError: outputs: must give tensors [rows, ...] of a microbatch: expected",
}


def test_wrong_keywords_and_rows_are_one_error_on_every_rank(world: World) -> None:
    first, second = world.run(wrong_calls, size=2)
    assert first == second
    assert set(first) == set(MESSAGES)
    for name, message in MESSAGES.items():
        assert first[name].startswith(message), first[name]


@pytest.mark.parametrize(
    ("value", "is_refused"),
    [
        ([0, 5, 9, 12], True),  # of all rows as one
        ([0, 1, 2, 3], True),  # of one
        ([0, 1, 2, 4], False),
        ([0, 5, 5, 12], False),
        ([1, 5, 9, 12], False),
    ],
)
def test_offsets_of_packed_rows_are_no_rows(value: list[int], is_refused: bool) -> None:
    """As many as there are rows, they would be cut into microbatches without a word."""
    keywords = {"cu_seqlens": torch.tensor(value, dtype=torch.int32)}
    settings = Settings(sample=torch.zeros(4, 3), sample_keywords=keywords, global_batch=4)

    def loss(output: Tensor, targets: Tensor, **keywords: Tensor) -> Tensor:
        del targets, keywords
        return output.mean()

    refused = pytest.raises(InfeasibleError, match="'cu_seqlens' has offsets of packed rows")
    with refused if is_refused else nullcontext():
        check_sizes([], settings, loss)


class Scaled(One):
    """Has a buffer that stays fp32, and so an output that is wider than what bf16 computes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((WIDTH,), 0.9))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh() * self.get_buffer("scale")


class Autocast(One):
    """Casts inside, so its output is narrower than its parameters."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.linear(x).tanh()


def number_types(degrees: dict[str, Any]) -> list[float]:
    """Losses of layers whose outputs are of other types than their parameters or their inputs."""
    losses = []
    kinds: tuple[tuple[type[nn.Module], Literal["fp32", "bf16"]], ...] = (
        (Scaled, "bf16"),
        (Autocast, "fp32"),
    )
    for kind, precision in kinds:
        layers = [layer.float() for layer in seeded([kind] * 6)]
        inputs, targets = (part.float() for part in data())
        with built(
            layers, sample=inputs[:MICROBATCH], precision=precision,
            optimizer=zeropp.OptimizerConfig("sgd", lr=0.5), **degrees,
        ) as model:  # fmt: skip
            rows = model.rows
            results = [model.train_step(inputs[rows], targets[rows]) for _ in range(3)]
            losses += [float(result.loss) for result in results]
            losses.append(model.eval_step(inputs[rows], targets[rows]))
    return losses


def test_other_number_types_cross_stages(world: World) -> None:
    (alone,) = world.run(number_types, {}, size=1)
    assert alone[2] < alone[0]
    for found in world.run(number_types, {"pp": 2, "chunks": 2}, size=2):
        assert found == pytest.approx(alone, rel=1e-3)


class ScaledLinear(nn.Linear):
    """A linear layer that computes as nn.Linear does."""


class Own(nn.Linear):
    """A linear layer with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * 2.0, self.bias)


def layers_of(kind: Kind = linear) -> list[nn.Module]:
    """Layers, equal on every rank."""
    return seeded([linear, *[kind] * 4, linear])


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.5)


def with_momentum(layers: list[nn.Module], **more: Any) -> ParallelModel:
    return built(layers, optimizer=lambda groups: optimizer(groups["all"]), **more)


def error_after_steps(model: ParallelModel, layers: list[nn.Module]) -> float:
    """The difference of this rank's parameters from those of one process that trains the layers."""
    expected, _ = trained_alone(layers, map(data, range(2)), optimizer)
    steps(model, 0, 1)
    return apart(
        dict(model.full_parameters()), dict(expected.named_parameters(remove_duplicate=False))
    )


LINEARS: dict[str, tuple[Kind, bool]] = {  # whether weight gradients are delayed
    "plain": (linear, True),
    "Conv1D": (lambda: Conv1D(WIDTH, WIDTH), False),
    "subclass": (lambda: ScaledLinear(WIDTH, WIDTH), True),
    "own forward": (lambda: Own(WIDTH, WIDTH), False),
}


@pytest.mark.parametrize("name", LINEARS)
@on_ranks(2)
def test_classes_of_linear_layers(name: str) -> None:
    kind, is_delayed = LINEARS[name]
    with with_momentum(layers_of(kind), pp=2, chunks=2) as model:
        assert error_after_steps(model, layers_of(kind)) < 1e-6
        assert any(flat.deferred for flat in model.engine.flats) == is_delayed


@pytest.mark.parametrize("degrees", [{"shard": 2}, {"chunks": 2, "shard": 2}], ids=str)
@on_ranks(4)
def test_copies_of_a_tied_weight_are_in_one_optimizer_group(degrees: dict[str, Any]) -> None:
    """Where each layer has its own learning rate."""
    rates = {"first": 0.1, "others": 0.01}
    with built(
        layers_of(), tied=((5, "weight"), (0, "weight")), pp=2, **degrees,
        group_of=lambda name, _: "first" if name[0] == 0 else "others",
        optimizer=lambda groups: torch.optim.AdamW(
            [{"params": groups[name], "lr": rate} for name, rate in rates.items()]
        ),
    ) as model:  # fmt: skip
        steps(model, 0, 1)
        whole = model.full_state_dict()
        assert bool(whole) == (dist.get_rank() == 0)
        assert not whole or torch.equal(whole["0.weight"], whole["5.weight"])


@pytest.mark.parametrize("degrees", [{"shard": 2}, {"pp": 2}, {"pp": 2, "chunks": 2}], ids=str)
@on_ranks(2)
def test_tied_parameters_begin_alike_in_every_order_and_topology(degrees: dict[str, Any]) -> None:
    names = ((0, "weight"), (5, "weight"))
    expected = layers_of()[0].get_parameter("weight").float()
    for tied in (names, names[::-1]):
        with with_momentum(layers_of(), tied=tied, **degrees) as model:
            values = model.full_state_dict()
        assert bool(values) == (dist.get_rank() == 0)
        if values:
            torch.testing.assert_close(values["0.weight"], expected)
            assert torch.equal(values["5.weight"], values["0.weight"])


@pytest.mark.parametrize("size", [1, 2, 3])
@on_ranks(lambda size: size)
def test_ties_of_any_two_layers(size: int) -> None:
    """At the ends or inside, in one chunk and in two."""
    for first, second, chunks in ((0, 5, 1), (0, 5, 2), (1, 4, 1), (1, 4, 2), (1, 2, 2)):
        together: list[Any] = layers_of()
        together[second].weight = together[first].weight
        tied = (first, "weight"), (second, "weight")
        with with_momentum(layers_of(), tied=tied, pp=size, chunks=chunks) as model:
            assert error_after_steps(model, together) < 1e-6


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
        "gradient_parts": draw.choice([1, 3]),
    }


def made(family: str) -> list[nn.Module]:
    with initial_std(0.5):
        return list(build_model(SHAPES[family], SEED).double())


def token_data(step: int, length: int = LENGTH) -> Tensor:
    """Tokens and targets."""
    return torch.randint(32, (2, ROWS, length), generator=torch.Generator().manual_seed(step))


@cache
def course_with_tokens(family: str, size: int, length: int = LENGTH) -> Course:
    """That of one process with microbatches of this many rows."""
    batches, evaluated = (
        [Batch(*token_data(first + step, length)) for step in range(STEPS)] for first in (0, 100)
    )
    evaluated = [Batch(one.inputs[:7], one.targets[:7]) for one in evaluated]
    sgd = partial(torch.optim.SGD, lr=SGD.lr)
    layers = made(family)
    return course_alone(layers, sgd, cross_entropy, batches, evaluated, rows=size, seed=SEED)


def parallel(family: str, length: int = LENGTH, **degrees: Any) -> ParallelModel:
    shape, in_slices = SHAPES[family], degrees.get("logits_slices", 1) > 1
    tied = ((0, "tokens.weight"), (shape.num_pieces - 1, "output.weight"))
    return zeropp.parallelize(
        made(family), counted if in_slices else cross_entropy, sample=token_data(0, length)[0],
        global_batch=ROWS, optimizer=SGD, tied=tied if shape.tied_embeddings else None,
        dropout_seed=SEED, loss_reduction="tokens" if in_slices else "mean", **degrees,
    )  # fmt: skip


def counted(logits: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    """The sum over all tokens, and their number."""
    return cross_entropy(logits, targets) * targets.numel(), targets.numel()


def errors_with_tokens(
    family: str, seed: int, length: int, slices: int, course: Course
) -> tuple[float, float, float, float]:
    with parallel(family, length, logits_slices=slices, **topology(seed)) as model:
        return errors_of(model, course)


@pytest.mark.parametrize(
    ("family", "seed", "length", "slices"),
    [
        ("gpt", 0, LENGTH, 1),
        ("gpt", 5, LONG, 1),
        ("llama", 5, LONG, 1),
        ("llama", 7, LENGTH, 1),
        ("gpt", 0, LENGTH, 2),
        ("llama", 5, LONG, 5),
    ],
)
def test_divided_sequences_are_those_of_one_process(
    world: World, family: str, seed: int, length: int, slices: int
) -> None:
    """Losses in fp64; the loss and rotary angles of these models are fp32, and so are copies of
    parameters."""
    drawn = topology(seed)
    expected = course_with_tokens(family, drawn["microbatch_size"], length)
    ranks = prod(drawn[axis] for axis in ("pp", "shard", "context", "replicate"))
    for evaluations, outputs, losses, parameters in world.run(
        errors_with_tokens, family, seed, length, slices, expected, size=ranks
    ):
        assert largest([evaluations, losses]) < 1e-6, (evaluations, losses, drawn)
        assert parameters < 1e-6, (parameters, drawn)
        assert outputs < 1e-5, (outputs, drawn)


@on_ranks(8)
def test_gradients_in_parts_are_those_of_whole_chunks_in_bf16_where_sequences_are_divided() -> None:
    inputs, targets = token_data(0)
    found = []
    for parts in (1, 3):
        degrees = {"pp": 2, "shard": 2, "context": 2, "chunks": 2, "microbatch_size": 1}
        with parallel("llama", precision="bf16", gradient_parts=parts, **degrees) as model:
            rows = inputs[model.rows], targets[model.rows]
            numbers = [model.train_step(*rows).loss for _ in range(STEPS)]
            assert any(flat.room is not None for flat in model.engine.flats) == (parts > 1)
            found.append([*numbers, *(value for _, value in model.engine.full_parameters())])
    assert all(map(torch.equal, *found))
    assert found[0][0] != found[0][1]


class Mixing(nn.Module):
    """A layer that mixes tokens in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.linear = way, nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        rows = len(x)
        if self.way == "windows":
            x = x.reshape(-1, min(x.shape[1], 1024), 24)
        q = self.linear(x).unflatten(-1, (4, 6)).transpose(1, 2)
        drop = 0.1 if self.way == "dropout" else 0.0
        mask = torch.ones(x.shape[1], x.shape[1]).tril().bool() if self.way == "mask" else None
        mixed = F.scaled_dot_product_attention(q, q, q, attn_mask=mask, dropout_p=drop)
        return (x + mixed.transpose(1, 2).flatten(2)).reshape(rows, -1, 24)


REFUSED = {
    "mask": "a layer makes a mask [6, 6] of its slice of 6 tokens",
    "dropout": "attention drops weights (dropout_p=0.1)",
    "windows": "attention is over 1024 tokens, but a slice of a sequence has 2048",
    "length": "must divide among context=5 ranks, but inputs are (1, 12)",
    "": "",
}


@on_ranks(2)
def test_what_slices_of_sequences_would_get_wrong_is_refused() -> None:
    for way, words in REFUSED.items():
        tokens, targets = token_data(0, 4096 if way == "windows" else LENGTH)
        torch.manual_seed(0)
        layers = [nn.Embedding(32, 24), Mixing(way), nn.Linear(24, 32)]
        given: dict[str, Any] = {"sample": tokens[:1], "context": {"length": 5}.get(way, 2)}
        said = error_of(partial(step_of, layers, cross_entropy, tokens, targets, **given))
        assert said == "" if not words else words in said, (way, said)


def step_of(layers: Any, loss: Any, tokens: Tensor, targets: Tensor, **given: Any) -> None:
    """Build a model, and train a step."""
    with zeropp.parallelize(layers, loss, global_batch=ROWS, **given) as model:
        model.train_step(tokens[model.rows], targets[model.rows])


def resumed(folder: str, expected: dict[str, Tensor]) -> float:
    """How far parameters are from those of one process, if each step runs in another topology."""
    for step, degrees in enumerate([{"pp": 2, "context": 2}, {"context": 4}, {"shard": 4}]):
        with parallel("llama", microbatch_size=2, **degrees) as model:
            if step:
                model.load(folder)
            if step < STEPS:
                model.train_step(*token_data(step)[:, model.rows])
                model.save(folder)
                continue
            whole = model.full_state_dict()
            return apart(whole, expected) if whole else 0.0
    raise AssertionError


def test_a_run_goes_on_with_another_context(world: World, tmp_path: Path) -> None:
    expected = course_with_tokens("llama", 2).parameters
    assert 0 < largest(world.run(resumed, str(tmp_path / "step"), expected, size=4)) < 1e-6


@on_ranks(2)
def test_modes_are_those_of_a_module() -> None:
    """Steps train in the mode that was set last, and an evaluation leaves it as it is."""

    def layers() -> list[nn.Module]:
        return seeded([linear, lambda: nn.Sequential(linear(), nn.Dropout(0.5)), linear])

    plain, batch = nn.ModuleList(layers()).eval(), data(0)
    _, losses = trained_alone(list(plain), [batch] * 2, partial(torch.optim.SGD, lr=RATE))
    with built(layers(), pp=2) as model:
        x, y = (part[model.rows] for part in batch)
        assert model.eval() is model
        assert [model.eval_step(x, y), *steps(model, 0)] == pytest.approx(losses[:1] * 2)
        assert model.train() is model
        model.eval_step(x, y)
        own = [part for layer in model.engine.layers.values() for part in layer.modules()]
        assert all(part.training for part in own)
        assert abs(steps(model, 0)[0] - losses[1]) > 1e-6


class Showing(One):
    """Keeps a view of a parameter, and what it gave last."""

    def __init__(self) -> None:
        super().__init__()
        self.alphas = nn.Parameter(torch.ones(2))
        self.shown: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.alpha = self.alphas[0]
        y = self.linear(x) * self.alpha
        self.shown = y.detach()
        return y


@on_ranks(2)
def test_an_evaluation_leaves_what_layers_show_and_no_view_of_a_parameter() -> None:
    with built(seeded([linear, Showing, linear]), shard=2) as model:
        steps(model, 0)
        (layer,) = (one for one in model.engine.layers.values() if isinstance(one, Showing))
        for step in (1, 2):
            before = layer.shown
            x, y = (part[model.rows] for part in data(step))
            model.eval_step(x, y)
            assert layer.shown is not None
            assert layer.shown is not before
        steps(model, 3)
