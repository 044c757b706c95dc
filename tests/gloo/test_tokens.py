"""A mean over the tokens of a whole batch, with ignored labels anywhere, against one process in
fp64: losses, gradients, parameters and evaluations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import zeropp
from tests.gloo.layers import WIDTH, One
from tests.gloo.models import apart, error_of, largest, ranks_of, seeded, topology
from tests.gloo.world import World
from zeropp import huggingface
from zeropp.train.parallel_model import ParallelModel

LAYERS, ROWS, LENGTH, VOCABULARY, STEPS = 6, 8, 6, 11, 3
SGD = zeropp.OptimizerConfig("sgd", lr=0.5, clip_norm=0.2)
MUON = "muon"  # with AdamW for what are no matrices of blocks, clipped as SGD is
TIED = (0, "weight"), (LAYERS - 1, "weight")
DISTRIBUTIONS = ("any", "first rows", "one label")


class Balanced(One):
    """A block that also gives a loss of its own: a sum over its tokens."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mixed = torch.tanh(self.linear(x))
        return x + mixed, 0.1 * mixed.square().sum()


class Block(Balanced):
    """A block without one."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        mixed, _ = super().forward(x)
        return mixed


def made(tied: bool) -> list[nn.Module]:
    """Layers in fp64, equal on every rank."""
    first = lambda: nn.Embedding(VOCABULARY, WIDTH)  # noqa: E731
    last = lambda: nn.Linear(WIDTH, VOCABULARY, bias=False)  # noqa: E731
    layers = seeded([first, Balanced, Block, Block, Balanced, last])
    if tied:
        layers[-1].weight = layers[0].weight
    return layers


def data(step: int, distribution: str, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    """Tokens and targets; of these are ignored: any, unequally many in each row; all those of the
    first half of the rows, which are whole ranks and microbatches; or all but one."""
    generator = torch.Generator().manual_seed(step)
    tokens, targets = torch.randint(VOCABULARY, (2, rows, LENGTH), generator=generator)
    shares = torch.rand(rows, 1, generator=generator)
    ignored = torch.rand(rows, LENGTH, generator=generator) < shares
    if distribution == "first rows":
        ignored[: rows // 2] = True
        ignored[-1, 0] = False
    if distribution == "one label":
        ignored[:] = True
        ignored[-1, 0] = False
    return tokens, targets.masked_fill(ignored, -100)


def token_loss(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The sum over labels that are not ignored, and their number."""
    total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return total, (targets != -100).sum()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_sliced_loss_is_that_of_all_tokens(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zeropp.engine.loss._SLICE", 5 * VOCABULARY)
    tokens, targets = data(0, "any")
    logits = torch.randn(*tokens.shape, VOCABULARY, dtype=torch.float64).to(dtype)

    def run(function: Any) -> tuple[Tensor, Tensor, Tensor]:
        given = logits.clone().requires_grad_()
        total, count = function(given, targets)
        (total * 0.25).backward()
        assert given.grad is not None
        return total.detach(), count, given.grad

    (whole, count, expected), (total, same, found) = run(token_loss), run(huggingface.token_loss)
    assert count == same
    close = 1e-12 if dtype == torch.float64 else 0.01
    torch.testing.assert_close(total.double(), whole.double(), rtol=close, atol=close)
    torch.testing.assert_close(found, expected, rtol=close, atol=close)
    with torch.no_grad():
        assert huggingface.token_loss(logits, targets)[0] == total


@pytest.mark.parametrize("again", ["twice", "differentiated"])
def test_a_sliced_loss_has_one_backward(again: str) -> None:
    """A second one raises, and so does one whose result would have no gradient of its own."""
    logits = torch.randn(3, 4, VOCABULARY, requires_grad=True)
    total, _ = huggingface.token_loss(logits, torch.zeros(3, 4, dtype=torch.long))
    if again == "twice":
        torch.autograd.backward(total, retain_graph=True)
    with pytest.raises(RuntimeError, match="in slices of the tokens a loss has one back"):
        torch.autograd.grad(total, logits, create_graph=again == "differentiated")


def group_of(name: tuple[int, str], parameter: nn.Parameter) -> str:
    """The optimizer group of a parameter under Muon."""
    return "matrices" if parameter.dim() == 2 and 0 < name[0] < LAYERS - 1 else "others"


def muon_and_adamw(groups: Mapping[str, list[nn.Parameter]]) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of blocks."""
    muon = torch.optim.Muon(groups["matrices"], lr=0.1)
    return [muon, torch.optim.AdamW(groups["others"], lr=0.05)]


def parallel(*, tied: bool = False, kind: str = "sgd", **degrees: Any) -> ParallelModel:
    optimizer: Any = {"optimizer": SGD}
    if kind == MUON:
        optimizer = {"optimizer": muon_and_adamw, "group_of": group_of, "clip_norm": SGD.clip_norm}
    return zeropp.parallelize(
        made(tied), degrees.pop("loss_fn", token_loss), loss_reduction="tokens", **optimizer,
        sample=data(0, "any")[0], global_batch=ROWS, tied=TIED if tied else None, **degrees,
    )  # fmt: skip


@dataclass(frozen=True)
class Course:
    """A training in one process, on whole batches: losses and norms of the steps, evaluations
    before them, the last gradients, after clipping, and the parameters."""

    numbers: list[tuple[float, float, float]]
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]


@cache
def alone(tied: bool, distribution: str, kind: str = "sgd") -> Course:
    model = nn.ModuleList(made(tied))
    optimizers: list[torch.optim.Optimizer] = [torch.optim.SGD(model.parameters(), lr=SGD.lr)]
    if kind == MUON:
        groups: dict[str, list[nn.Parameter]] = {"matrices": [], "others": []}
        for name, parameter in model.named_parameters():
            groups[group_of((int(name[0]), name), parameter)].append(parameter)
        optimizers = muon_and_adamw(groups)

    def loss_of(tokens: Tensor, targets: Tensor) -> Tensor:
        value, own = tokens, torch.zeros(())
        for layer in model:
            given = layer(value)
            value, own = (given[0], own + given[1]) if isinstance(given, tuple) else (given, own)
        total, count = token_loss(value, targets)
        return (total + own) / count

    numbers = []
    for step in range(STEPS):
        with torch.no_grad():
            evaluated = float(loss_of(*data(100 + step, distribution, rows=7)))
        model.zero_grad()
        loss = loss_of(*data(step, distribution))
        loss.backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.clip_grad_norm_(model.parameters(), SGD.clip_norm)
        assert norm > SGD.clip_norm
        for optimizer in optimizers:
            optimizer.step()
        numbers.append((float(loss.detach()), float(norm), evaluated))
    named = dict(model.named_parameters())
    gradients = {name: one.grad for name, one in named.items() if one.grad is not None}
    return Course(numbers, gradients, {name: one.detach() for name, one in named.items()})


def errors(seed: int, distribution: str, kind: str, expected: Course) -> tuple[float, float, float]:
    """How far this rank's numbers, gradients and parameters are from those of one process."""
    with parallel(kind=kind, **topology(seed)) as model:
        relative = []
        for step, numbers in enumerate(expected.numbers):
            share = slice(model.data_parallel_rank, None, model.data_parallel_size)
            loss = model.eval_step(*(part[share] for part in data(100 + step, distribution, 7)))
            result = model.train_step(*(part[model.rows] for part in data(step, distribution)))
            ours = float(result.loss), float(result.grad_norm), loss
            relative += [abs(a / b - 1) for a, b in zip(ours, numbers, strict=True)]
        gradients, parameters = dict(model.gradients()), dict(model.full_parameters())
    assert gradients.keys() == parameters.keys()
    own = apart(gradients, expected.gradients), apart(parameters, expected.parameters)
    return largest(relative), *own


@pytest.mark.parametrize("seed", range(3))
def test_random_topologies_are_one_process(world: World, seed: int) -> None:
    """Parameters are given in fp32."""
    drawn = topology(seed)
    courses = [*((distribution, "sgd") for distribution in DISTRIBUTIONS), ("any", MUON)]
    for distribution, kind in courses:
        expected = alone(drawn["tied"], distribution, kind)
        for numbers, gradients, parameters in world.run(
            errors, seed, distribution, kind, expected, size=ranks_of(drawn)
        ):
            assert numbers < 1e-9, (numbers, distribution, kind, drawn)
            assert gradients < 1e-9, (gradients, distribution, kind, drawn)
            assert parameters < 1e-6, (parameters, distribution, kind, drawn)


def in_bf16() -> tuple[float, float]:
    """The first step's loss and norm of a model that computes in bf16."""
    layers = [layer.float() for layer in made(False)]
    with zeropp.parallelize(
        layers, token_loss, sample=data(0, "any")[0][:2], global_batch=ROWS, pp=2, precision="bf16",
        loss_reduction="tokens", optimizer=SGD,
    ) as model:  # fmt: skip
        result = model.train_step(*data(0, "any"))
        return float(result.loss), float(result.grad_norm)


def test_bf16_is_near(world: World) -> None:
    loss, norm, _ = alone(False, "any").numbers[0]
    for numbers in world.run(in_bf16, size=2):
        assert numbers == pytest.approx((loss, norm), rel=0.02)


def unusual() -> tuple[dict[str, str], list[float], int]:
    """What wrong losses say; losses and norms of batches without a label; steps that were
    skipped."""
    losses = {
        "one number": lambda logits, targets: token_loss(logits, targets)[0],
        "rows": lambda logits, targets: (logits.sum(1), 1),
    }
    messages = {}
    for name, function in losses.items():
        model = parallel(microbatch_size=2, pp=2, loss_fn=function)
        messages[name] = error_of(lambda m=model: m.train_step(*data(0, "any")))  # type: ignore[misc]
    numbers = []
    with parallel(microbatch_size=2, pp=2, loss_fn=lambda logits, _: (logits.sum(), 0)) as model:
        before = dict(model.full_parameters())
        result = model.train_step(*data(0, "any"))
        numbers += [float(result.loss), model.eval_step(*data(0, "any"))]
        assert all(torch.equal(before[name], value) for name, value in model.full_parameters())
        return messages, numbers, int(model.skipped_steps)


def test_what_is_no_sum_and_count_is_an_error_and_no_count_updates_nothing(world: World) -> None:
    first, second = world.run(unusual, size=2)
    words = "TypeError: loss_fn: gives (), but (sum, count) of a microbatch is needed with"
    assert second[0]["one number"].startswith(words)
    assert second[0]["rows"].startswith("TypeError: loss_fn: gives (2, 11), but a tensor of one")
    assert first[0] == {
        name: f"PeerError: rank 1 raised {text}" for name, text in second[0].items()
    }
    assert all(torch.tensor([*first[1], *second[1]]).isfinite().logical_not())
    assert first[2] == second[2] == 1
