"""Gradients of every parameter, losses and parameters: the engine against one process."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partialmethod
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from baselines.model import build_model
from tests.gloo.cases import (
    ADAMW,
    SEED,
    Case,
    Outcome,
    loss_function,
    train,
    train_alone,
    worst_error,
)
from tests.gloo.world import World, on_ranks
from zeropp.engine.ranks.collectives import Channels, neighbours
from zeropp.types.training import OptimizerConfig

SGD = OptimizerConfig(kind="sgd", lr=0.1)
CASES = [
    Case(pp=1, chunks=1, unit=3, batch=4),
    Case(pp=2, replicate=2, chunks=3, unit=4, batch=12, layers=6, recompute="full"),
    Case(pp=2, chunks=2, unit=4, batch=8, layers=9, recompute="full", recomputed=(1, 0, 2, 1)),
    Case(pp=4, chunks=2, unit=4, batch=8, layers=8, cap=7),
    Case(pp=2, shard=2, chunks=2, unit=2, batch=8, recompute="selective"),
    Case(pp=1, shard=4, chunks=2, unit=2, batch=16, reduce_every="step"),
    Case(pp=1, replicate=2, zero=True, chunks=2, unit=2, batch=8, tied=True),
    Case(pp=2, shard=2, replicate=2, zero=True, batch=16, tied=True, recompute="full"),
    Case(pp=2, replicate=3, zero=True, tied=True, chunks=2, batch=12, placement="pp_inner"),
    Case(pp=2, shard=2, chunks=2, batch=8, dropout=0.2, recompute="full"),
    Case(pp=2, shard=2, chunks=3, unit=1, batch=12, layers=6, cap=3, reduce_every="step"),
    Case(pp=2, shard=2, chunks=2, unit=3, batch=10, split_backward=False, recompute="full"),
    # With those above: pp, shard and replicate in {1, 2, 3}, alone and in pairs. Units that do not
    # divide the microbatches, and fewer microbatches than pipeline ranks.
    Case(pp=1, shard=3, chunks=1, unit=2, batch=9),
    Case(pp=1, replicate=3, chunks=3, unit=2, batch=9),
    Case(pp=1, shard=2, replicate=2, zero=True, chunks=2, unit=3, batch=16),
    Case(pp=1, shard=2, replicate=3, chunks=1, unit=1, batch=6, layers=2),
    Case(pp=2, shard=3, chunks=1, unit=2, batch=9, tied=True),
    Case(pp=3, shard=2, unit=3, batch=4, layers=6, recompute="full", placement="pp_inner"),
    Case(pp=3, replicate=2, zero=True, chunks=1, unit=3, batch=2),
]


def check(outcomes: list[Outcome], expected: Outcome, tolerance: float) -> None:
    names: set[str] = set()
    for outcome in outcomes:
        assert outcome.losses == pytest.approx(expected.losses, rel=tolerance)
        assert outcome.norms == pytest.approx(expected.norms, rel=tolerance)
        assert worst_error(outcome.gradients, expected.gradients) < tolerance
        names |= set(outcome.gradients)
    assert names == set(expected.gradients)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_fp64_gradients_and_two_steps(case: Case, world: World) -> None:
    dtype, steps, optimizer = torch.float64, 2, replace(ADAMW, clip_norm=0.5)
    expected = train_alone(case.shape, case.batch, optimizer, steps, dtype)
    outcomes = world.run(train, case, dtype, steps, optimizer, size=case.world)
    check(outcomes, expected, 1e-12)
    for outcome in outcomes:
        exact = {name: value.float() for name, value in expected.parameters.items()}
        assert worst_error(outcome.parameters, exact) < 1e-6


LLAMA = [
    Case(pp=2, shard=2, chunks=2, unit=3, batch=10, recompute="full"),
    Case(pp=2, shard=2, chunks=2, unit=2, batch=8, recompute="selective", tied=True),
    Case(pp=2, shard=2, chunks=2, unit=2, batch=8, recompute="mlp", recomputed=(1, 1, 0, 1)),
    Case(pp=2, replicate=2, zero=True, tied=True, unit=4, batch=12, placement="pp_inner"),
]


@pytest.mark.parametrize("case", LLAMA, ids=str)
def test_fp32_gradients_of_llama(case: Case, world: World) -> None:
    case = replace(case, family="llama")
    found = world.run(train, case, torch.float32, 1, SGD, size=case.world)
    check(found, train_alone(case.shape, case.batch, SGD, 1), 1e-5)


BF16 = [
    Case(2, shard=2, precision="bf16", recompute="full"),
    Case(2, shard=2, replicate=2, zero=True, precision="bf16", batch=16, tied=True),
    Case(1, replicate=3, zero=True, precision="bf16", batch=12),
]


@pytest.mark.parametrize("case", BF16, ids=str)
def test_bf16_computes_with_fp32_masters(case: Case, world: World) -> None:
    expected = train_alone(case.shape, case.batch, SGD, 2)
    for outcome in world.run(train, case, torch.float32, 2, SGD, size=case.world):
        assert outcome.losses == pytest.approx(expected.losses, rel=5e-3)
        assert {p.dtype for p in outcome.gradients.values()} == {torch.float32}
        assert outcome.norms == pytest.approx(expected.norms, rel=2e-2)
        assert worst_error(outcome.gradients, expected.gradients) < 0.1


MANY = Case(pp=2, shard=2, chunks=1, precision="bf16", batch=64, layers=2)
ULP = torch.finfo(torch.bfloat16).eps  # relative; rounding one addition costs at most half of it


@cache
def step_alone_in_bf16(case: Case, total: torch.dtype) -> dict[str, torch.Tensor]:
    """Parameters after a step of plain SGD in one process that computes in bf16 and sums the
    gradients of its microbatches in ``total``."""
    model = build_model(case.shape, SEED)
    masters = [parameter.detach().clone() for parameter in model.parameters()]
    model.bfloat16()
    sums = [torch.zeros_like(master, dtype=total) for master in masters]
    for x, y in zip(*(torch.split(part, 1) for part in case.data(0)), strict=True):
        (loss_function(model(x), y) / case.batch).backward()  # type: ignore[no-untyped-call]
        for gradient, parameter in zip(sums, model.parameters(), strict=True):
            assert parameter.grad is not None
            gradient += parameter.grad
            parameter.grad = None
    names = [name for name, _ in model.named_parameters()]
    after = (one - SGD.lr * gradient.float() for one, gradient in zip(masters, sums, strict=True))
    return dict(zip(names, after, strict=True))


def drift(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Distance of two sets of parameters, over how far training has moved them."""
    start = build_model(MANY.shape, SEED).requires_grad_(False).state_dict()
    apart = sum(float((found[name] - expected[name]).square().sum()) for name in expected)
    moved = sum(float((expected[name] - start[name]).square().sum()) for name in expected)
    return float((apart / moved) ** 0.5)


def test_bf16_sums_of_many_microbatches_stay_within_one_ulp(world: World) -> None:
    expected = step_alone_in_bf16(MANY, torch.float32)
    outcomes = world.run(train, MANY, torch.float32, 1, SGD, size=MANY.world)
    found = {name: value for outcome in outcomes for name, value in outcome.parameters.items()}
    assert set(found) == set(expected)
    assert drift(found, expected) < ULP


def test_sums_in_bf16_would_be_seen() -> None:
    wide, narrow = (step_alone_in_bf16(MANY, total) for total in (torch.float32, torch.bfloat16))
    assert drift(narrow, wide) > ULP


def train_compiled(case: Case, *arguments: Any) -> tuple[Outcome, int]:
    """As ``train``, with graphs captured and split but not translated to C++, which takes long;
    and the number of graphs."""
    torch._dynamo.reset()
    graphs = torch._dynamo.utils.counters["stats"]
    before = graphs["unique_graphs"]
    in_python = partialmethod(nn.Module.compile, backend="aot_eager")
    with mock.patch.object(nn.Module, "compile", in_python):
        return train(case, *arguments), graphs["unique_graphs"] - before


@pytest.mark.parametrize(
    "case",
    [
        Case(1, shard=2, chunks=3, batch=4, layers=9, compile=True),
        Case(1, shard=2, chunks=3, batch=4, recompute="full", compile=True),
    ],
    ids=str,
)
def test_compiled_blocks_have_the_same_gradients(case: Case, world: World) -> None:
    found = world.run(train_compiled, case, torch.float64, 2, ADAMW, size=case.world)
    expected = train_alone(case.shape, case.batch, ADAMW, 2, torch.float64)
    check([outcome for outcome, _ in found], expected, 1e-10)
    # Of a kind of block, not of each: more kinds than torch's limit would fall back to eager.
    assert all(0 < graphs <= 8 for _, graphs in found)


@pytest.mark.parametrize(
    ("case", "groups"),
    [
        (Case(pp=2, batch=12, layers=8), 2),
        (Case(pp=2, replicate=3, batch=36, layers=8), 2),
        (Case(pp=3, replicate=2, batch=24, layers=8), 6),
        (Case(pp=4, replicate=2, batch=24, layers=8), 4),
    ],
    ids=str,
)
@on_ranks(lambda case: case.world)
def test_few_process_groups_whatever_the_world(case: Case, groups: int) -> None:
    plan = case.plan()
    with mock.patch.object(dist, "new_group", wraps=dist.new_group) as made:
        Channels(neighbours(plan.schedule), plan.layout, torch.device("cpu"))
    assert made.call_count == groups
