"""Ranks of one pipeline that are given different rows, as a sampler over all ranks gives them."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DistributedSampler

from tests.gloo.layers import ROWS, WIDTH, linear
from tests.gloo.models import built, data, error_of, loss_function, seeded, step
from tests.gloo.world import World
from zeropp.engine.ranks.given_rows import checksum

OTHER = 1  # the rank whose rows are others


def sampled() -> list[str]:
    """What steps say to the rows of samplers: one over all ranks, one over the data-parallel
    ranks; and then to steps in which one part of one rank's batch is another."""
    with built(pp=2) as model:
        said = []
        everywhere = (dist.get_rank(), dist.get_world_size())
        for rank, size in (everywhere, (model.data_parallel_rank, model.data_parallel_size)):
            indices: Any = range(2 * ROWS)
            sampler: Any = DistributedSampler(indices, size, rank, shuffle=False)
            rows = [*sampler][:ROWS]
            inputs, targets = (torch.cat([part, part + 1])[rows] for part in data())
            said.append(error_of(partial(model.train_step, inputs, targets)))
        inputs, targets = data()
        last = dist.get_rank() == OTHER
        turned, changed = (part.clone() if last else part for part in (inputs, targets))
        if last:
            turned[[0, 1]] = inputs[[1, 0]]
            changed[-1, -1] += 1e-12
        for call in (model.train_step, model.eval_step):
            said.append(error_of(partial(call, turned, targets)))
            said.append(error_of(partial(call, inputs, changed)))
        return [*said, str(step(model))]


def test_different_rows_in_one_pipeline_are_refused_on_every_rank(world: World) -> None:
    first, second = world.run(sampled, size=2)
    assert first == second
    words = (
        "RowsError: {}: ranks of one pipeline were given different rows: {!r} is not the same on"
    )
    for said, call, part in (
        (first[0], "train_step", "inputs"),
        (first[2], "train_step", "inputs"),
        (first[3], "train_step", "targets"),
        (first[4], "eval_step", "inputs"),
        (first[5], "eval_step", "targets"),
    ):
        assert said.startswith(words.format(call, part) + " ranks [0, 1]"), said
        assert "model.rows" in said
        assert "data_parallel_rank" in said
    assert first[1] == ""
    assert float(first[6]) > 0  # a refused step leaves the model as it was


def masked(rank: int) -> str:
    """What a step says where one rank has another mask, which only the loss function reads."""

    def loss(output: Tensor, target: Tensor, mask: Tensor) -> Tensor:
        return loss_function(output * mask, target)

    mask = torch.ones(ROWS, 1, dtype=torch.float64)
    given: dict[str, Any] = {"loss_fn": loss, "sample_keywords": {"mask": mask[:1]}}
    with built(seeded([linear] * 2), pp=2, replicate=2, **given) as model:
        inputs, targets = (part[model.rows] for part in data())
        own = mask[model.rows] * (1 + (dist.get_rank() == rank))
        return error_of(lambda: model.train_step(inputs, targets, mask=own))


def test_different_keyword_inputs_are_refused(world: World) -> None:
    for rank in (0, 3):
        (said,) = set(world.run(masked, rank, size=4))
        assert "'mask' is not the same on ranks [" in said
        assert str(rank) in said
    assert set(world.run(masked, -1, size=4)) == {""}  # replicas have other rows, rightly


@pytest.mark.parametrize("kind", [torch.bool, torch.uint8, torch.bfloat16, torch.complex128])
def test_achecksum_is_of_values_and_their_order(kind: torch.dtype) -> None:
    rows = torch.arange(1, 4 * WIDTH + 1).view(4, WIDTH).triu().to(kind)
    assert int(checksum(rows)) == int(checksum(rows.clone())) != 0
    others = (rows.flip(0), rows[:2], torch.zeros_like(rows), rows[:, 0])
    assert len({int(checksum(part)) for part in (rows, *others)}) == 5
    assert int(checksum(rows.t())) == int(checksum(rows.t().contiguous()))
    assert int(checksum(torch.empty(0, 2))) != 0  # which would not be compared
