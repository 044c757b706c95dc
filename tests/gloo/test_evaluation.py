"""``train_step`` and ``eval_step`` in turn, against one process in fp64: layers with several
tensors between them, keyword inputs, dropout, and sums as losses; wrong keyword inputs and batches;
and outputs of other number types than their layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeropp
from tests.gloo.layers import WIDTH, One
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
    with_keywords,
)
from tests.gloo.world import World
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
