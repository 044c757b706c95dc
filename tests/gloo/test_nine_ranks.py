"""Three times three: a world of nine ranks in every pair of axes, against one process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from tests.gloo.engine_cases import ADAMW, Case, train, train_alone, worst_error
from tests.gloo.world import World

CASES = [
    Case(pp=3, shard=3, chunks=1, unit=3, batch=9, layers=4),
    Case(pp=3, replicate=3, zero=True, chunks=1, batch=9, layers=4, tied=True),
    Case(pp=1, shard=3, replicate=3, zero=True, chunks=2, batch=9, layers=4),
]


@pytest.fixture(scope="module")
def nine() -> Iterator[World]:
    with World(9) as world:
        yield world


@pytest.mark.parametrize("case", CASES, ids=["pp x shard", "pp x replicate", "shard x replicate"])
def test_nine_ranks_are_one_process(case: Case, nine: World) -> None:
    arguments = (case, torch.float64, 2, replace(ADAMW, clip_norm=0.5))
    expected = train_alone(*arguments)
    outcomes = nine.run(train, *arguments, size=9)
    assert {name for one in outcomes for name in one.gradients} == set(expected.gradients)
    for outcome in outcomes:
        assert outcome.losses == pytest.approx(expected.losses, rel=1e-12)
        assert outcome.grad_norms == pytest.approx(expected.grad_norms, rel=1e-12)
        assert worst_error(outcome.gradients, expected.gradients) < 1e-12
