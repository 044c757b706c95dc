"""``eval_step`` against one process in fp64, and the training around it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.gloo.step_cases import (
    DEGREES,
    Batch,
    Course,
    course_of,
    evaluated,
    parallel,
    ranks_of,
    worst,
)
from tests.gloo.world import World
from zeropp.parallel_model import ParallelModel


def uneven_rows(model: ParallelModel) -> slice:
    """This rank's part of seven rows: two, five, or none where there are three such ranks."""
    if model.data_parallel_size == 1:
        return slice(0, 7)
    parts = {0: slice(0, 2), model.data_parallel_size - 1: slice(2, 7)}
    return parts.get(model.data_parallel_rank, slice(0, 0))


def evaluate(degrees: dict[str, Any], courses: Sequence[Course]) -> list[tuple[float, float]]:
    """Largest error of the losses of uneven batches before and between steps, and of the
    parameters that come of the steps, for every course."""
    errors = []
    for course in courses:
        kind, reduction = course.kind, course.reduction
        with parallel(kind, reduction, degrees) as model:
            apart = 0.0
            for step, expected in enumerate(course.evaluations):
                batch = evaluated(kind, reduction, step)
                inputs, targets, keywords = batch.part(uneven_rows(model))
                drawn = torch.get_rng_state()
                loss = model.eval_step(inputs, targets, **keywords)
                assert torch.equal(drawn, torch.get_rng_state())
                chunks = model.engine.chunks.values()
                assert not any(chunk.shards.gathered_bytes() for chunk in chunks)
                apart = max(apart, abs(loss / expected - 1))
                inputs, targets, keywords = Batch(kind, reduction, step).part(model.rows)
                model.train_step(inputs, targets, **keywords)
            errors.append((apart, worst(model, course.parameters)))
    return errors


@pytest.mark.parametrize(
    "degrees", DEGREES, ids=lambda d: " ".join(f"{k}={v}" for k, v in d.items())
)
def test_evaluation_is_that_of_one_process_and_leaves_nothing(
    world: World, degrees: dict[str, Any]
) -> None:
    kinds = [("tuples", "mean"), ("keywords", "sum"), ("dropout", "mean")]
    courses = [course_of(kind, reduction, 3) for kind, reduction in kinds]
    for errors in world.run(evaluate, degrees, courses, size=ranks_of(degrees)):
        assert len(errors) == len(kinds)
        for loss, parameters in errors:
            assert loss < 1e-12
            assert parameters < 1e-6
