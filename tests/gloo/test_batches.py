"""Batches of a step: the model's loader, and the size of microbatches."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import zeropp
from tests.gloo.layers import WIDTH, linear
from tests.gloo.models import built, error_of, seeded
from tests.gloo.world import World, on_ranks
from zeropp.train.parallel_model import ParallelModel

ROWS, COUNT = 8, 27
PER_EPOCH = COUNT // ROWS


class Numbers(torch.utils.data.Dataset[Any]):
    """Rows that say which they are."""

    def __init__(self, count: int = COUNT) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.full((WIDTH,), float(index)), torch.zeros(WIDTH)


def made(degrees: dict[str, Any], **more: Any) -> ParallelModel:
    """Three small layers in fp32."""
    layers = [layer.float() for layer in seeded([linear] * 3)]
    keywords: dict[str, Any] = {"sample": torch.zeros(1, WIDTH), "microbatch_size": 2, **more}
    sgd = zeropp.OptimizerConfig("sgd", lr=1e-6)
    keywords = {"global_batch": ROWS, "optimizer": sgd, **keywords}
    return built(layers, **keywords, **degrees)


def numbers_of(inputs: Tensor) -> list[int]:
    """Which rows these are."""
    return [int(row) for row in inputs[:, 0]]


def train_on(model: ParallelModel, steps: int) -> Iterator[list[int]]:
    """Which rows this rank trains on, from the model's loader."""
    while True:
        for inputs, targets in model.loader(Numbers(), seed=5):
            if not steps:
                return
            steps -= 1
            model.train_step(inputs, targets)
            yield numbers_of(inputs)


def through_an_interruption(
    first: dict[str, Any], then: dict[str, Any], folder: Path
) -> list[tuple[int, list[int]]]:
    """(data-parallel rank, rows) of five steps; after two the topology is another one."""
    rows = []
    for degrees, steps in ((first, 2), (then, PER_EPOCH)):
        with made(degrees) as model:
            if steps != 2:
                model.load(folder)
            rows += [(model.data_parallel_rank, part) for part in train_on(model, steps)]
            model.save(folder)
    return rows


def test_an_epoch_has_every_row_once_and_goes_on_elsewhere(world: World, tmp_path: Path) -> None:
    ranks = world.run(
        through_an_interruption, {"pp": 2, "replicate": 2}, {"shard": 4}, tmp_path / "c", size=4
    )
    steps = [dict(of_ranks) for of_ranks in zip(*ranks, strict=True)]
    batches = [[row for rank in sorted(step) for row in step[rank]] for step in steps]
    assert all(len(batch) == ROWS for batch in batches)
    first, second = batches[:PER_EPOCH], batches[PER_EPOCH:]
    seen = [row for batch in first for row in batch]
    assert len(set(seen)) == len(seen) == PER_EPOCH * ROWS
    assert seen != sorted(seen)
    assert len(second) == 2
    assert second != first[:2]


def in_other_batches(sizes: list[int], folder: Path) -> list[list[int]]:
    """The rows of two steps of every size, which one run after another has."""
    rows = []
    for place, size in enumerate(sizes):
        with made({}, global_batch=size) as model:
            if place:
                model.load(folder)
            rows += [*train_on(model, 2)]
            model.save(folder)
    return rows


def test_batches_of_another_size_go_on_behind_the_rows_that_were_seen(
    world: World, tmp_path: Path
) -> None:
    (found,) = world.run(in_other_batches, [ROWS, 2, ROWS, 4], tmp_path, size=1)
    first, later = found[:4], found[4:]
    assert len({row for part in first for row in part}) == 2 * ROWS + 2 * 2
    # Seven rows are left, too few for a batch: the next epoch begins.
    assert len({row for part in later for row in part}) == 2 * ROWS + 2 * 4
    (whole,) = world.run(in_other_batches, [ROWS, ROWS], tmp_path, size=1)
    assert later[0] == whole[3]


def evaluated_on() -> list[list[int]]:
    """Which rows this rank evaluates on, twice, after a step of training."""
    with made({"replicate": 2}) as model:
        next(train_on(model, 1))
        loader = model.loader(Numbers(), shuffle=False, resume=False)
        return [numbers_of(inputs) for _ in range(2) for inputs, _ in loader]


def test_rows_to_evaluate_on_begin_at_the_first_one(world: World) -> None:
    first, second = world.run(evaluated_on, size=2)
    whole = [row for parts in zip(first, second, strict=True) for part in parts for row in part]
    assert whole == 2 * list(range(PER_EPOCH * ROWS))


@on_ranks(2)
def test_data_sets_that_do_not_fit_are_refused() -> None:
    stream: Any = iter(())
    uneven = Numbers(COUNT + torch.distributed.get_rank())
    with made({"replicate": 2}) as model:
        for dataset, words in (
            (uneven, "ranks differ: rank 0 has 27 rows where rank 1 has 28 rows"),
            (Numbers(ROWS - 1), "has 7 rows, fewer than global_batch=8"),
            (stream, "tuple_iterator has no length or no rows by number"),
        ):
            said = error_of(partial(model.loader, dataset))
            assert said.startswith(f"InfeasibleError: dataset: {words}"), said


@on_ranks(2)
def test_a_sample_has_any_number_of_rows() -> None:
    torch.manual_seed(0)
    inputs, losses = torch.randn(ROWS, WIDTH), []
    for rows, size, count in ((1, 4, 2), (3, 4, 2), (ROWS, 4, 2), (4, 0, 2), (3, 1, 8)):
        with made({"pp": 2}, sample=inputs[:rows], microbatch_size=size) as model:
            losses.append(float(model.train_step(inputs, inputs.tanh()).loss))
            assert model.plan.num_microbatches == count
    assert losses == pytest.approx([losses[0]] * 5, rel=1e-6)
