"""Losses that are not what ``loss_reduction`` says over the rows of a microbatch: refused by the
first step, which is otherwise as it would be without the comparison."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.gloo.small_layers import BATCH, WIDTH, built, data, error_of, linear, seeded
from tests.gloo.world import World
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
    """A mean over classes, some of which count more."""
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
    return built(
        seeded([linear] * 4), loss_fn=loss_fn, loss_reduction=reduction, sample=data()[0][:rows],
        pp=2, **more,
    )  # fmt: skip


def messages() -> dict[str, str]:
    """What the first step says to each loss; empty where it accepts it."""
    cases = REFUSED | ACCEPTED
    raised = {}
    for name, case in cases.items():
        model = parallel(*case)
        raised[name] = error_of(lambda m=model: m.train_step(*data()))  # type: ignore[misc]
    return raised


def test_losses_that_depend_on_how_a_batch_is_cut_are_refused(world: World) -> None:
    first, second = world.run(messages, size=2)
    assert first == second
    assert {name for name, message in first.items() if message} == set(REFUSED)
    for name, (_, reduction, _) in REFUSED.items():
        words = "InfeasibleError: loss_fn: is not "
        assert first[name].startswith(words), first[name]
        assert f"loss_reduction='{reduction}'" in first[name]
        assert "\n" not in first[name]


def traces() -> tuple[list[int], list[int], bool]:
    """Calls of a loss function up to the end of each of two steps, those that a loss module's
    buffer has counted, and whether a step has drawn what its microbatches draw, and no more."""
    calls: list[int] = []
    counted: list[int] = []
    seen = [0]

    def watched(output: Tensor, target: Tensor) -> Tensor:
        seen[0] += 1
        return F.mse_loss(output, target)

    module = Counting()
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
    return calls, counted, bool(torch.equal(ours, torch.get_rng_state()))


def test_the_comparison_is_made_once_and_leaves_no_trace(world: World) -> None:
    _, (calls, counted, is_alike) = world.run(traces, size=2)
    microbatches = BATCH // ROWS
    assert calls[1] - calls[0] == microbatches < calls[0]
    assert counted == [microbatches, 2 * microbatches]
    assert is_alike
