"""``train_step`` and ``eval_step`` in turn, against one process in fp64: layers with several
tensors between them, keyword inputs, dropout, and sums as losses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.gloo.differences import largest
from tests.gloo.step_cases import (
    DEGREES,
    Alone,
    Batch,
    Course,
    course_of,
    evaluated,
    label,
    parallel,
    ranks_of,
    worst,
)
from tests.gloo.world import World
from zeropp.train.parallel_model import ParallelModel


def uneven_rows(model: ParallelModel) -> slice:
    """This rank's part of seven rows: two, five, or none where there are three such ranks."""
    if model.data_parallel_size == 1:
        return slice(0, 7)
    parts = {0: slice(0, 2), model.data_parallel_size - 1: slice(2, 7)}
    return parts.get(model.data_parallel_rank, slice(0, 0))


def same_outputs(model: ParallelModel, batch: Batch, expected: Tensor) -> bool:
    """Whether this rank gets what one process gives for its rows, from both methods."""
    rows = uneven_rows(model)
    inputs, targets, keywords = batch.part(rows)
    plain = model.forward_only(inputs, **keywords)
    loss, less = model.eval_step(
        inputs, targets, outputs=lambda output: (output.argmax(-1), output[:, 0]), **keywords
    )
    ours = expected[rows]
    return (
        isinstance(plain, Tensor)
        and plain.shape == ours.shape
        and bool((plain - ours).abs().le(1e-12).all())
        and torch.equal(less[0], ours.argmax(-1))
        and less[1].shape == ours[:, 0].shape
        and loss == model.eval_step(inputs, targets, **keywords)
    )


def outputs_of(degrees: dict[str, Any], expected: dict[str, Tensor]) -> list[bool]:
    """For every kind of layers whether the outputs are those of one process."""
    same = []
    for kind, output in expected.items():
        with parallel(kind, "mean", degrees) as model:
            same.append(same_outputs(model, evaluated(kind, "mean", 0), output))
    return same


def train_and_evaluate(
    degrees: dict[str, Any], courses: Sequence[Course]
) -> list[tuple[float, float, float]]:
    """For every course the largest errors of the losses of uneven batches before and between steps,
    of the losses of the steps, and of the parameters that come of them."""
    errors = []
    for course in courses:
        kind, reduction = course.kind, course.reduction
        with parallel(kind, reduction, degrees) as model:
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
            parameter_error = worst(model, course.parameters)
            errors.append((largest(evaluation_errors), largest(step_errors), parameter_error))
    return errors


@pytest.mark.parametrize("degrees", DEGREES, ids=label)
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


@pytest.mark.parametrize("degrees", DEGREES[:3], ids=label)
def test_every_rank_gets_the_outputs_of_its_rows(world: World, degrees: dict[str, Any]) -> None:
    expected = {kind: Alone(kind, "mean").output(evaluated(kind, "mean", 0))
                for kind in ("keywords", "dropout")}  # fmt: skip
    for same in world.run(outputs_of, degrees, expected, size=ranks_of(degrees)):
        assert same == [True, True]
