"""``train_step`` and ``eval_step`` in turn, against one process in fp64: layers with several
tensors between them, keyword inputs, dropout, and sums as losses; wrong calls; number
types; and parameters of linear layers, ties and norms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

import zeropp
from tests.gloo.layers import WIDTH, Kind, One, linear
from tests.gloo.models import (
    KINDS,
    MICROBATCH,
    Batch,
    Course,
    apart,
    built,
    course_of,
    data,
    error_of,
    evaluated,
    largest,
    ranks_of,
    seeded,
    steps,
    trained_alone,
    with_keywords,
)
from tests.gloo.world import World, on_ranks
from zeropp.train.parallel_model import ParallelModel

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
    """Both methods must give this rank what one process gives for its rows."""
    rows = uneven_rows(model)
    inputs, targets, keywords = batch.part(rows)
    plain = model.forward_only(inputs, **keywords)
    loss, less = model.eval_step(
        inputs, targets, outputs=lambda output: (output.argmax(-1), output[:, 0]), **keywords
    )
    ours = expected[rows]
    assert isinstance(plain, Tensor)
    assert plain.shape == ours.shape
    assert (plain - ours).abs().le(1e-12).all()
    assert torch.equal(less[0], ours.argmax(-1))
    assert less[1].shape == ours[:, 0].shape
    assert loss == model.eval_step(inputs, targets, **keywords)


def train_and_evaluate(
    degrees: dict[str, Any], courses: Sequence[Course]
) -> list[tuple[float, float, float]]:
    """For every course the largest errors of the losses of uneven batches before and between steps,
    of the losses of the steps, and of the parameters that come of them."""
    errors = []
    for course in courses:
        kind, reduction = course.kind, course.reduction
        with with_keywords(kind, reduction, degrees) as model:
            check_outputs(model, evaluated(kind, reduction, 0), course.output)
            evaluation_errors, step_errors = [], []
            for step, expected in enumerate(course.evaluations):
                batch = evaluated(kind, reduction, step)
                inputs, targets, keywords = batch.part(uneven_rows(model))
                drawn = torch.get_rng_state()
                loss = model.eval_step(inputs, targets, **keywords)
                assert torch.equal(drawn, torch.get_rng_state())
                flats = (flat for flat in model.engine.flats if not flat._resident)
                assert not any(flat._storage.nbytes() for flat in flats)
                evaluation_errors.append(abs(loss / expected - 1))
                inputs, targets, keywords = Batch(kind, reduction, step).part(model.rows)
                loss = float(model.train_step(inputs, targets, **keywords).loss)
                step_errors.append(abs(loss / course.losses[step] - 1))
            parameter_error = apart(dict(model.full_parameters()), course.parameters)
            errors.append((largest(evaluation_errors), largest(step_errors), parameter_error))
    return errors


@pytest.mark.parametrize("degrees", DEGREES, ids=str)
def test_steps_and_evaluations_are_those_of_one_process(
    world: World, degrees: dict[str, Any]
) -> None:
    kinds = [("tuples", "mean"), ("keywords", "sum"), ("dropout", "mean")]
    courses = [course_of(kind, reduction, 2) for kind, reduction in kinds]
    for errors in world.run(train_and_evaluate, degrees, courses, size=ranks_of(degrees)):
        assert len(errors) == len(kinds)
        for evaluation, step, parameters in errors:
            assert evaluation < 1e-12
            assert step < 1e-12
            assert parameters < 1e-6  # they come as fp32


def wrong_calls() -> dict[str, str]:
    """What wrong keyword inputs and batches say."""
    whole = Batch("keywords", "mean", 0)
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
    "Conv1D": (lambda: Conv1D(WIDTH, WIDTH), True),
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


class Normed(nn.Module):
    """A residual layer with a norm, which notes the types it computes in."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        with torch.no_grad():
            self.norm.weight.add_(2.0**-12)  # bf16 has no such number
        self.seen: set[tuple[Any, ...]] = set()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(x)
        if not x.is_meta:
            dtypes = (one.dtype for one in (x, y, self.linear.weight, self.norm.weight))
            self.seen.add((*dtypes, float(self.norm.weight.detach()[0])))
        return x + self.linear(y)  # type: ignore[no-any-return]


def normed(degrees: dict[str, Any], kinds: tuple[type[nn.Module], ...]) -> tuple[Any, Any]:
    """What layers have seen in a first step in bf16, and its gradients."""
    torch.manual_seed(4)
    layers = [Normed() for _ in range(4)]
    x, y = (part.float() for part in data())
    given: dict[str, Any] = {"sample": x[:1], "precision": "bf16", "fp32_modules": kinds}
    with built(layers, optimizer=zeropp.OptimizerConfig(), **given, **degrees) as model:
        model.train_step(x[model.rows], y[model.rows])
        return set().union(*(layer.seen for layer in layers)), dict(model.gradients())


def test_norms_compute_in_fp32_where_asked(world: World) -> None:
    (wide, alone), (narrow, rounded) = (
        world.run(normed, {}, kinds, size=1)[0] for kinds in ((nn.LayerNorm,), ())
    )
    short = torch.bfloat16
    assert wide == {(short, short, short, torch.float32, 1 + 2.0**-12)}
    assert narrow == {(short, short, short, short, 1.0)}
    assert 0 < apart(rounded, alone) < 0.1
    degrees = {"pp": 2, "shard": 2, "recompute": "full"}
    for seen, gradients in world.run(normed, degrees, (nn.LayerNorm,), size=4):
        assert seen == wide
        for name, one in gradients.items():
            torch.testing.assert_close(one, alone[name], rtol=2e-2, atol=1e-3)


@on_ranks(2)
def test_frozen_norms_in_bf16_compute_in_fp32() -> None:
    layers = [Normed().bfloat16() for _ in range(2)]
    for layer in layers:
        layer.norm.requires_grad_(False)
    x, y = (part.float() for part in data())
    given: dict[str, Any] = {"precision": "bf16", "fp32_modules": (nn.LayerNorm,)}
    with built(layers, sample=x[:1], shard=2, **given) as model:
        assert float(model.train_step(x[model.rows], y[model.rows]).loss) > 0
    assert [seen[3] for layer in layers for seen in layer.seen] == [torch.float32] * 2
