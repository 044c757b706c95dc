"""Losses that are not what ``loss_reduction`` says over the rows of a microbatch: refused by the
first step, which is otherwise as it would be without the comparison."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from tests.gloo.layers import ROWS as BATCH
from tests.gloo.layers import WIDTH
from tests.gloo.models import built, data, error_of
from tests.gloo.world import World, on_ranks
from zeropp.train.parallel_model import ParallelModel

ROWS = 3  # of a microbatch, whose halves are one row and two


def labels(target: Tensor) -> Tensor:
    """A class per row; unequally many of each half are ignored."""
    classes = torch.arange(len(target)) % WIDTH
    return classes.masked_fill(target[:, 0] > 0.3, -100)


def contrastive(output: Tensor, target: Tensor) -> Tensor:
    """Every row against all others of its microbatch."""
    return F.cross_entropy(output @ target.mT, torch.arange(len(output)))


def shaped(output: Tensor, target: Tensor) -> Tensor:
    """A mean that takes whole microbatches only."""
    return F.mse_loss(output.view(ROWS, WIDTH), target)


def drawing(output: Tensor, target: Tensor) -> Tensor:
    """A mean over rows with noise of torch's generator."""
    return F.mse_loss(output + torch.randn_like(output), target)


class Counting(nn.Module):
    """A mean over rows that counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.get_buffer("calls").add_(1)
        return F.mse_loss(output, target)


def weighted(output: Tensor, target: Tensor) -> Tensor:
    """A mean over classes; some count more."""
    weight = torch.arange(1.0, WIDTH + 1, dtype=output.dtype)
    return F.cross_entropy(output, target.argmax(-1), weight=weight)


REFUSED: dict[str, tuple[Callable[..., Any], str, int]] = {
    "contrastive": (contrastive, "mean", ROWS),
    "norm": (lambda output, target: (output - target).norm(), "sum", ROWS),
    "sum as mean": (lambda output, target: F.mse_loss(output, target, reduction="sum"), "mean", 3),
    "mean as sum": (F.mse_loss, "sum", ROWS),
    "ignored labels": (lambda output, target: F.cross_entropy(output, labels(target)), "mean", 3),
    "no count": (lambda output, target: ((output - target).square().sum(), 1), "tokens", ROWS),
    "weights of one row": (weighted, "mean", 1),
}
ACCEPTED: dict[str, tuple[Callable[..., Any], str, int]] = {
    "mean": (F.mse_loss, "mean", ROWS),
    "sum": (lambda output, target: F.mse_loss(output, target, reduction="sum"), "sum", ROWS),
    "count": (lambda output, target: ((output - target).square().sum(), len(output)), "tokens", 3),
    "one row": (F.mse_loss, "mean", 1),
    "the first row": (lambda output, target: F.mse_loss(output[0], target[0]), "mean", 1),
    "whole microbatches": (shaped, "mean", ROWS),
    "noise": (drawing, "mean", ROWS),
}


def parallel(loss_fn: Callable[..., Any], reduction: str, rows: int, **more: Any) -> ParallelModel:
    """Four linear layers in two stages."""
    given = {"loss_fn": loss_fn, "loss_reduction": reduction, "sample": data()[0][:rows]}
    return built(pp=2, **given, **more)


@pytest.mark.parametrize("name", REFUSED | ACCEPTED)
def test_losses_that_depend_on_how_a_batch_is_cut_are_refused(world: World, name: str) -> None:
    first, second = world.run(message_of, name, size=2)
    assert first == second
    if name in ACCEPTED:
        assert first == ""
    else:
        assert first.startswith("InfeasibleError: loss_fn: is not "), first
        assert f"loss_reduction='{REFUSED[name][1]}'" in first
        assert "\n" not in first


def message_of(name: str) -> str:
    """What the first step says to a loss; empty where it accepts it."""
    model = parallel(*(REFUSED | ACCEPTED)[name])
    return error_of(lambda: model.train_step(*data()))


@on_ranks(2)
def test_the_comparison_is_made_once_and_leaves_no_trace() -> None:
    seen, counted, module = [0], [], Counting()

    def watched(output: Tensor, target: Tensor) -> Tensor:
        seen[0] += 1
        return F.mse_loss(output, target)

    calls = []
    with parallel(watched, "mean", ROWS) as model, parallel(module, "mean", ROWS) as other:
        for number in range(2):
            model.train_step(*data(number))
            other.train_step(*data(number))
            calls.append(seen[0])
            counted.append(int(module.get_buffer("calls")))
    torch.manual_seed(7)
    with parallel(drawing, "mean", ROWS, dropout_seed=None) as model:
        drawn = torch.get_rng_state()
        model.train_step(*data())
        ours = torch.get_rng_state()
        torch.set_rng_state(drawn)
        for _ in range(BATCH // ROWS):
            torch.randn(ROWS, WIDTH, dtype=torch.float64)
    if dist.get_rank() == 1:  # which computes the loss, and draws what its microbatches draw
        microbatches = BATCH // ROWS
        assert calls == [microbatches, 2 * microbatches]
        assert counted == [microbatches, 2 * microbatches]
        assert torch.equal(ours, torch.get_rng_state())
