"""Gradients in parts: when each is reduced, what they hold together, and what cannot have them.
That they are those of one process is with all other topologies (``test_engine``)."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest import mock

import pytest
from torch import Tensor, nn
from torch.nn import functional as F

import zeropp
from tests.gloo.cases import SGD, Case, build_model_of, local_microbatches
from tests.gloo.models import data, loss_function, refuses
from tests.gloo.world import on_ranks
from zeropp.engine.layers import deferred
from zeropp.engine.layers.deferred import accumulate
from zeropp.engine.parameters.flat import FlatParameters
from zeropp.engine.parameters.parts import GradientParts


@pytest.mark.parametrize(
    "case",
    [
        Case(pp=1, shard=2, chunks=4, parts=3, recompute="full"),
        Case(pp=1, shard=2, chunks=4, parts=3, split_backward=False, family="llama"),
    ],
    ids=str,
)
@on_ranks(2)
def test_each_part_is_reduced_with_its_last_product_and_all_have_the_room_of_one_chunk(
    case: Case,
) -> None:
    engine = build_model_of(case, optimizer=SGD).engine
    before, held = [], []
    finish, make = GradientParts.finish, FlatParameters.make_gradients
    parts = [flat for flat in engine.flats if flat.room is not None]

    def finished(self: GradientParts) -> None:
        before.append(self._next)
        finish(self)

    def made(self: FlatParameters) -> None:
        make(self)
        reducing = engine.lanes.shard_reductions
        held.append(sum(f.gradient_bytes for f in parts if f.has_sums or f in reducing))

    with (
        mock.patch.object(GradientParts, "finish", finished),
        mock.patch.object(FlatParameters, "make_gradients", made),
    ):
        engine.step(local_microbatches(case, 0))
    chunks = {chunk: [f for f in chunk.flats if f.room] for chunk in engine.chunks.values()}
    assert set(before) == {3, *(0 for flats in chunks.values() if not flats)}
    assert max(held) == max(sum(f.gradient_bytes for f in flats) for flats in chunks.values())


@on_ranks(2)
def test_weight_gradients_of_several_microbatches_are_one_product() -> None:
    case = Case(pp=1, shard=2, chunks=2, unit=3, batch=8, merged=3, split_backward=False)
    engine = build_model_of(case, optimizer=SGD).engine
    rows: list[int] = []

    def added(_: nn.Parameter, left: Tensor, *others: Any) -> None:
        rows.append(len(left))
        accumulate(_, left, *others)

    with mock.patch.object(deferred, "accumulate", added):
        engine.step(local_microbatches(case, 0))
    layers = sum(len([*flat.parameters]) for flat in engine.flats if flat.deferred)
    assert Counter(rows) == {3 * case.shape.seq: layers, case.shape.seq: layers}


class Uses(nn.Module):
    """A linear layer, before which its weight is used outside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(F.linear(x, self.linear.weight).relu())  # type: ignore[no-any-return]


@on_ranks(2)
def test_a_gradient_that_comes_after_its_part_is_refused() -> None:
    inputs, targets = (one[:8, :8].float() for one in data())
    asked: dict[str, Any] = {"sample": inputs[:1], "global_batch": len(inputs), "shard": 2}
    layers = [nn.Linear(8, 8), Uses(), nn.Linear(8, 8)]
    with zeropp.parallelize(layers, loss_function, **asked, gradient_parts=2) as model:
        rows = inputs[model.rows], targets[model.rows]
        refuses(
            "RuntimeError: gradient_parts: one of ['linear.weight'] is used",
            lambda: model.train_step(*rows),
        )
