"""Several tensors between layers, keyword inputs, sums as losses and number types: each against one
process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

import zeropp
from tests.gloo.step_cases import (
    DEGREES,
    MICROBATCH,
    ROWS,
    Alone,
    Batch,
    made,
    mean_loss,
    parallel,
    ranks_of,
    worst,
)
from tests.gloo.world import World


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
    for errors in world.run(train, degrees, kinds, size=ranks_of(degrees)):
        assert len(errors) == len(kinds)
        for loss, parameters in errors:
            assert loss < 1e-12
            assert parameters < 1e-6  # they come as fp32


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
