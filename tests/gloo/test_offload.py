"""Offloaded activations: the same numbers, to the last bit, and what is sent leaves the device."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function

import zeropp
from tests.gloo.cases import Case, build_model_of, local_microbatches
from tests.gloo.world import on_ranks
from zeropp.engine.layers.offload import HostMemory, Offload

CASES = [
    Case(pp=1, shard=2, chunks=6, unit=2, recompute="full", dropout=0.1, offload=4),
    Case(pp=2, chunks=3, unit=4, family="llama", recompute="mlp", precision="bf16", offload=8),
    Case(pp=2, shard=2, recompute="selective", tied=True, offload=2),
    Case(pp=1, replicate=2, zero=True, chunks=3, unit=4, family="llama", offload=3),
]


def trained(case: Case) -> tuple[list[Tensor], int]:
    """All numbers of two steps, with evaluations between, and how often something was stored."""
    engine = build_model_of(case).engine
    numbers: list[Any] = []
    for step in range(2):
        result = engine.step(local_microbatches(case, step))
        batch = engine.agree("eval_step", lambda: local_microbatches(case, 3))
        numbers += [result.loss, result.grad_norm, engine.evaluate(batch)[0]]
    numbers += [value.clone() for _, value in engine.full_gradients()]
    numbers += [value for _, value in engine.full_parameters()]
    stored = engine.interpreter.counters().get("store", 0)
    engine.close()
    return [torch.as_tensor(number) for number in numbers], stored


@pytest.mark.parametrize("case", CASES, ids=str)
@on_ranks(lambda case: case.world)
def test_numbers_are_equal_to_the_last_bit(case: Case) -> None:
    expected, _ = trained(replace(case, offload=0))
    numbers, stored = trained(case)
    assert all(map(torch.equal, numbers, expected))
    assert stored > 0


class Reads(Function):
    """Saves its input, for which its backward asks twice, and one tensor for both."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kept: list[int]) -> Tensor:
        ctx.save_for_backward(x, x.t())
        ctx.kept = kept
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        first, second = ctx.saved_tensors[0], ctx.saved_tensors[1]
        ctx.kept.append(first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr())
        return gradient * (first + second.t()), None


class Squares(nn.Module):
    def __init__(self, shared: list[bool]) -> None:
        super().__init__()
        self.linear, self.shared = nn.Linear(4, 4), shared

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = Reads.apply(self.linear(x).tanh(), self.shared)  # type: ignore[no-untyped-call]
        return y


@on_ranks(1)
def test_what_is_sent_is_freed_and_sent_once() -> None:
    shared: list[bool] = []
    held: list[int] = []
    free = Offload.free

    def looking(offload: Offload, microbatch: int) -> None:
        free(offload, microbatch)
        memories = [*offload._live[microbatch].memories.values()]
        held.append(sum(memory.values is not None for memory in memories))
        pieces = [piece for memory in memories for piece in memory.pieces]
        sent.append(sum(map(len, pieces)))

    sent: list[int] = []
    x = torch.randn(12, 4, generator=torch.Generator().manual_seed(1))
    with mock.patch.object(Offload, "free", looking):
        model = zeropp.parallelize(
            [nn.Linear(4, 4), *(Squares(shared) for _ in range(4)), nn.Linear(4, 4)],
            nn.functional.mse_loss, sample=x[:3], global_batch=12, chunks=6, unit=4,
            offload_blocks=4,
        )  # fmt: skip
        model.train_step(x, x)
    assert held == [0] * 16
    assert sent == [2 * 3 * 4 * 4] * 16  # the linear layer's input, and what tanh gives
    assert shared == [True] * 16


class Changes(nn.Module):
    """Changes in place what its exponential has saved."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).exp()
        z: Tensor = y.add_(1) * 2
        return z


@pytest.mark.parametrize("sent", [0, 2])
@on_ranks(1)
def test_what_is_changed_after_it_was_saved_is_an_error_as_without(sent: int) -> None:
    x = torch.randn(12, 4, generator=torch.Generator().manual_seed(1))
    layers = [nn.Linear(4, 4), Changes(), Changes(), nn.Linear(4, 4)]
    with pytest.raises(Exception, match="modified by an inplace operation"):
        zeropp.parallelize(
            layers, nn.functional.mse_loss, sample=x[:3], global_batch=12, chunks=4, unit=4,
            offload_blocks=sent,
        ).train_step(x, x)  # fmt: skip


def test_memory_of_the_host_that_nobody_uses_is_taken_first() -> None:
    """Else chunks that store more and those that store less would each have memory of their own."""
    with ExitStack() as undo:
        host = HostMemory(torch.device("cpu"), undo)
        large = host.take(2**33)
        host.free[len(large)].append(large)
        assert host.take(2**27) is large
        small = host.take(2**27)
        assert len(small) < len(large)
