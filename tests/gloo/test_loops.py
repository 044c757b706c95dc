"""What people's training loops need: sequences of other lengths, losses beside the main one, steps
that are skipped, gradients to read, one error where ranks call different things; and means over the
tokens of a whole batch, with ignored labels anywhere."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, partial, partialmethod
from pathlib import Path
from typing import Any
from unittest import mock
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.distributed.checkpoint.state_dict_saver import save
from torch.nn import functional as F

import zeropp
from tests.gloo.cases import loss_function
from tests.gloo.layers import ROWS, WIDTH, One, linear
from tests.gloo.models import (
    adamw,
    apart,
    built,
    data,
    error_of,
    largest,
    ranks_of,
    refuses,
    seeded,
    steps,
    topology,
    trained_alone,
)
from tests.gloo.world import World, on_ranks
from tests.waiting import wait_until
from zeropp import huggingface
from zeropp.engine.loss import Microbatches
from zeropp.engine.parameters.flat import FlatParameters
from zeropp.engine.ranks import errors
from zeropp.train.parallel_model import ParallelModel

VOCABULARY = 11
LENGTHS = (5, 9, 5, 3)  # of the steps' sequences
DEGREES: list[dict[str, Any]] = [
    {"pp": 2, "chunks": 2},
    {"pp": 2, "shard": 2},
    {"replicate": 2, "replicate_zero": 1},
]


class Balanced(One):
    """A block that also gives a loss of its own: a sum over its tokens."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mixed = torch.tanh(self.linear(x))
        return x + mixed, 0.1 * mixed.square().sum()


class Plain(Balanced):
    """A block without one."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        mixed, _ = super().forward(x)
        return mixed


def token_layers(tied: bool = False) -> list[nn.Module]:
    """Layers in fp64, equal on every rank."""
    first = lambda: nn.Embedding(VOCABULARY, WIDTH)  # noqa: E731
    last = lambda: nn.Linear(WIDTH, VOCABULARY, bias=False)  # noqa: E731
    layers = seeded([first, Balanced, Plain, Plain, Balanced, last])
    if tied:
        layers[-1].weight = layers[0].weight
    return layers


def tokens(number: int) -> tuple[Tensor, Tensor]:
    """A global batch, with the length of its step."""
    generator = torch.Generator().manual_seed(number)
    both = torch.randint(VOCABULARY, (2, ROWS, LENGTHS[number]), generator=generator)
    return both[0], both[1]


@cache
def alone() -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Losses, parameters and the last step's gradients in one process."""
    batches, optimizer = map(tokens, range(len(LENGTHS))), partial(torch.optim.AdamW, lr=0.01)
    model, losses = trained_alone(token_layers(), batches, optimizer, loss_fn=loss_function)
    parameters = {name: one.detach() for name, one in model.named_parameters()}
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return losses, parameters, gradients


def parallel(degrees: dict[str, Any], **more: Any) -> ParallelModel:
    """The layers on this rank."""
    given: dict[str, Any] = {"loss_fn": loss_function, "sample": tokens(0)[0][:1]}
    return built(token_layers(), optimizer=adamw, **given, **degrees, **more)


@pytest.mark.parametrize("degrees", DEGREES, ids=str)
@on_ranks(ranks_of)
def test_other_lengths_and_losses_beside_the_main_one(degrees: dict[str, Any]) -> None:
    expected, parameters, gradients = alone()
    with parallel(degrees) as model:
        losses = []
        x, y = (part[model.rows][:1] for part in tokens(0))
        model.engine._evaluator.warm_up(Microbatches([x], [y]))
        for number in range(len(LENGTHS)):
            inputs, targets = (part[model.rows] for part in tokens(number))
            evaluated = model.eval_step(inputs, targets)
            losses.append(float(model.train_step(inputs, targets).loss))
        found, sums = dict(model.full_parameters()), dict(model.gradients())
    assert losses == pytest.approx(expected, rel=1e-12)
    assert evaluated == pytest.approx(expected[-1], rel=1e-12)
    assert apart(found, parameters) < 1e-6
    assert apart(sums, gradients) < 1e-6
    names: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(names, set(sums))
    assert set().union(*names) == set(gradients)


@on_ranks(2)
def test_replicas_may_have_sequences_of_different_lengths() -> None:
    generator = torch.Generator().manual_seed(4)
    x, y = torch.randn(2, ROWS, 3, WIDTH, generator=generator, dtype=torch.float64)
    alone = nn.Sequential(*seeded([linear] * 2))
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    model = built(seeded([linear] * 2), sample=x[:1], replicate=2)
    for lengths in ((2, 3), (3, 2), (2, 2)):
        mine = lengths[dist.get_rank()]
        found = float(model.train_step(x[model.rows, :mine], y[model.rows, :mine]).loss)
        halves = zip(x.chunk(2), y.chunk(2), lengths, strict=True)
        losses = [F.mse_loss(alone(a[:, :length]), b[:, :length]) for a, b, length in halves]
        loss = torch.stack(losses).mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        assert found == pytest.approx(float(loss.detach()), rel=1e-12)


def nadam(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.NAdam(groups["all"], lr=0.1)


def spoilt(model: ParallelModel, number: int = 0, everywhere: bool = True) -> float:
    """A step whose targets are infinite, in one row of the last rank or everywhere; the
    gradient's norm."""
    inputs, targets = (part[model.rows].clone() for part in data(number))
    if everywhere:
        targets.fill_(torch.inf)
    elif dist.get_rank() == dist.get_world_size() - 1:
        targets[0] = torch.inf
    return float(model.train_step(inputs, targets).grad_norm)


@pytest.mark.parametrize("fused", [False, True])
@on_ranks(2)
def test_a_step_without_finite_gradients_is_skipped_on_all_ranks(fused: bool) -> None:
    optimizer = lambda groups: torch.optim.AdamW(groups["all"], lr=0.1, fused=fused)  # noqa: E731
    first, second = (built(shard=2, optimizer=optimizer) for _ in range(2))
    assert torch.isfinite(torch.tensor(steps(first, 0))).all()
    assert not math.isfinite(spoilt(first, 1, everywhere=False))
    assert steps(first, 2, 3) == steps(second, 0, 2, 3)[1:]
    assert float(first.skipped_steps) == 1
    assert apart(dict(first.full_parameters()), dict(second.full_parameters())) == 0


@on_ranks(2)
def test_an_optimizer_that_has_only_skipped_steps_has_not_begun(tmp_path: Path) -> None:
    first, loaded, new = (built(shard=2, optimizer=nadam) for _ in range(3))
    spoilt(first)
    state = first.state_dict()["optimizer"]
    assert {float(one) for name, one in state.items() if name.endswith(".step")} == {0.0}
    first.save(tmp_path / "skipped")
    loaded.load(tmp_path / "skipped")
    assert steps(loaded, 0) == steps(new, 0)
    assert float(loaded.skipped_steps) == 1
    assert apart(dict(loaded.full_parameters()), dict(new.full_parameters())) == 0


@on_ranks(2)
def test_a_checkpoint_that_counts_no_skipped_steps_has_none(tmp_path: Path) -> None:
    """Two models that have skipped a step read a checkpoint and a state dict without the count."""
    saved, *others = models = [built(shard=2, optimizer=nadam) for _ in range(3)]
    steps(saved, 0)
    for model in others:
        spoilt(model)
    state = saved.state_dict()
    del state["skipped_steps"]
    save({"model": state}, checkpoint_id=str(tmp_path / "old"))
    others[0].load(tmp_path / "old")
    others[1].load_state_dict(state)
    assert [float(model.skipped_steps) for model in models] == [0.0] * 3
    for model in models:
        steps(model, 0)
    for model in others:
        assert apart(dict(model.full_parameters()), dict(saved.full_parameters())) == 0


@on_ranks(2)
def test_a_warm_up_holds_the_gradients_of_one_chunk_at_a_time() -> None:
    engine = built(pp=2, chunks=2, weights=[1.0] * 4).engine
    make, held = FlatParameters.make_gradients, []

    def count() -> int:
        chunks = engine.chunks.values()
        return sum(any(flat.gradient() is not None for flat in one.flats) for one in chunks)

    def make_and_count(flat: FlatParameters) -> None:
        make(flat)
        held.append(count())

    inputs, targets = ([part[:1]] for part in data(0))
    with mock.patch.object(FlatParameters, "make_gradients", make_and_count):
        engine._evaluator.warm_up(Microbatches(inputs, targets))
    assert len(engine.chunks) == 2
    assert (max(held), count()) == (1, 0)


@on_ranks(2)
def test_kernels_are_warmed_up_for_every_shape_and_a_failure_is_one_of_a_step() -> None:
    """As on a GPU."""
    engine = built(seeded([linear] * 2), shard=2).engine
    with (
        mock.patch.object(engine, "_device", torch.device("cuda")),
        mock.patch.object(engine._evaluator, "warm_up") as warmed,
    ):

        def agree(rows: int) -> None:
            inputs, targets = ([part[:rows]] for part in data(0))
            engine.agree("train_step", lambda: Microbatches(inputs, targets))

        for rows, calls in ((1, 1), (1, 1), (2, 2), (1, 2)):
            agree(rows)
            assert warmed.call_count == calls
        warmed.side_effect = RuntimeError("no memory")
        assert error_of(lambda: agree(3)) == "RuntimeError: no memory"
        words = "RuntimeError: an earlier step raised RuntimeError: no memory; create a new"
        assert error_of(lambda: agree(3)).startswith(words)


class Dropping(One):
    """A linear layer with dropout."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.linear(x), 0.5, self.training).tanh()


@on_ranks(2)
def test_compiled_dropout_draws_what_eager_dropout_does() -> None:
    """Each data-parallel rank and each step has masks of its own."""
    in_python = partialmethod(nn.Module.compile, backend="aot_eager")
    losses = []
    for compiles in (False, True):
        layers = seeded([linear, Dropping, Dropping, linear])
        with (
            mock.patch.object(nn.Module, "compile", in_python),
            built(layers, shard=2, compile=compiles) as model,
        ):
            losses.append(steps(model, 0, 1, 2))
    assert losses[1] == pytest.approx(losses[0], rel=1e-12)


def hurry(before: timedelta, after: timedelta) -> None:
    """Give all groups but the default one another timeout: one that is made with a short one may be
    too slow to connect."""
    pg: Any = distributed_c10d
    for group in {*pg._world.pg_map} - {dist.group.WORLD}:
        assert group._get_backend(torch.device("cpu")).options._timeout == before
        pg._set_pg_timeout(after, group)


def not_together(told: Path) -> dict[str, str]:
    """What ranks say that call different methods, give other lengths, or come late: rank 1 waits
    until rank 0 has told of it by making a file."""
    found = {}
    with (
        mock.patch.dict(os.environ, {"TORCH_GLOO_LAZY_INIT": "0"}),  # else who is late is unknown
        parallel({"pp": 2}, timeout=timedelta(minutes=7)) as model,
        mock.patch.object(errors, "_REPORT", timedelta(seconds=1)),
    ):
        inputs, targets = tokens(0)
        calls = model.train_step, model.eval_step
        found["calls"] = error_of(lambda: calls[dist.get_rank()](inputs, targets))
        others = lambda: model.save("nowhere"), lambda: model.train_step(inputs, targets)
        found["saves"] = error_of(others[dist.get_rank()])
        reads = lambda: [*model.full_parameters()], lambda: [*model.gradients()]
        found["reads"] = error_of(reads[dist.get_rank()])
        part = slice(4 + dist.get_rank())
        found["lengths"] = error_of(lambda: model.train_step(inputs[:, part], targets[:, part]))
        found["good"] = error_of(lambda: model.train_step(inputs, targets))
        hurry(timedelta(minutes=7), timedelta(seconds=1))
        if dist.get_rank() == 1:
            wait_until(told.exists, "rank 0 has told")
        else:
            found["late"] = error_of(lambda: model.train_step(inputs, targets))
            told.touch()
    return found


def test_ranks_that_are_not_together_say_so(world: World, tmp_path: Path) -> None:
    first, second = world.run(not_together, tmp_path / "told", size=2)
    assert first["calls"].startswith("RuntimeError: train_step: ranks [1] have called another")
    assert second["calls"].startswith("RuntimeError: eval_step: ranks [0] have called another")
    assert first["saves"].startswith("RuntimeError: save: ranks [1] have called another")
    assert first["reads"].startswith("RuntimeError: full_parameters: ranks [1] have called another")
    assert second["reads"].startswith("RuntimeError: gradients: ranks [0] have called another")
    assert first["lengths"] == second["lengths"]
    assert first["lengths"].startswith(
        "RowsError: train_step: ranks [0, 1], which are one pipeline"
    )
    assert not first["good"]
    assert "Ranks 1 failed to pass" in first["late"]


LAYERS, TOKEN_ROWS, LENGTH, STEPS = 6, 8, 6, 3
SGD = zeropp.OptimizerConfig("sgd", lr=0.5, clip_norm=0.2)
MUON = "muon"  # with AdamW for what are no matrices of blocks, clipped as SGD is
TIED = (0, "weight"), (LAYERS - 1, "weight")
DISTRIBUTIONS = ("any", "first rows", "one label")


def token_data(step: int, distribution: str, rows: int = TOKEN_ROWS) -> tuple[Tensor, Tensor]:
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
    tokens, targets = token_data(0, "any")
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
    """A second one raises, by torch, and so does one whose result would have no gradient."""
    logits = torch.randn(3, 4, VOCABULARY, requires_grad=True)
    total, _ = huggingface.token_loss(logits, torch.zeros(3, 4, dtype=torch.long))
    if again == "twice":
        torch.autograd.backward(total, retain_graph=True)
    words = (
        "modified by an inplace" if again == "twice" else "in slices of the tokens a loss has no"
    )
    with pytest.raises(RuntimeError, match=words):
        torch.autograd.grad(total, logits, create_graph=again == "differentiated")


def group_of(name: tuple[int, str], parameter: nn.Parameter) -> str:
    """The optimizer group of a parameter under Muon."""
    return "matrices" if parameter.dim() == 2 and 0 < name[0] < LAYERS - 1 else "others"


def muon_and_adamw(groups: Mapping[str, list[nn.Parameter]]) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of blocks."""
    muon = torch.optim.Muon(groups["matrices"], lr=0.1)
    return [muon, torch.optim.AdamW(groups["others"], lr=0.05)]


def with_tokens(*, tied: bool = False, kind: str = "sgd", **degrees: Any) -> ParallelModel:
    optimizer: Any = {"optimizer": SGD}
    if kind == MUON:
        optimizer = {"optimizer": muon_and_adamw, "group_of": group_of, "clip_norm": SGD.clip_norm}
    return zeropp.parallelize(
        token_layers(tied),
        degrees.pop("loss_fn", token_loss),
        loss_reduction="tokens",
        **optimizer,
        sample=token_data(0, "any")[0],
        global_batch=TOKEN_ROWS,
        tied=TIED if tied else None,
        **degrees,
    )


@dataclass(frozen=True)
class Course:
    """A training in one process, on whole batches: losses and norms of the steps, evaluations
    before them, the last gradients, after clipping, and the parameters."""

    numbers: list[tuple[float, float, float]]
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]


@cache
def alone_with_tokens(tied: bool, distribution: str, kind: str = "sgd") -> Course:
    model = nn.ModuleList(token_layers(tied))
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
            evaluated = float(loss_of(*token_data(100 + step, distribution, rows=7)))
        model.zero_grad()
        loss = loss_of(*token_data(step, distribution))
        loss.backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.clip_grad_norm_(model.parameters(), SGD.clip_norm)
        assert norm > SGD.clip_norm
        for optimizer in optimizers:
            optimizer.step()
        numbers.append((float(loss.detach()), float(norm), evaluated))
    named = dict(model.named_parameters())
    gradients = {name: one.grad for name, one in named.items() if one.grad is not None}
    return Course(numbers, gradients, {name: one.detach() for name, one in named.items()})


def token_errors(
    degrees: dict[str, Any], distribution: str, kind: str, expected: Course
) -> tuple[float, float, float]:
    """How far this rank's numbers, gradients and parameters are from those of one process."""
    with with_tokens(kind=kind, **degrees) as model:
        relative = []
        of_rank = [part[model.rows] for part in token_data(0, distribution)]
        model.engine._evaluator.warm_up(model.training_batch(*of_rank))  # as on a GPU
        for step, numbers in enumerate(expected.numbers):
            share = slice(model.data_parallel_rank, None, model.data_parallel_size)
            loss = model.eval_step(
                *(part[share] for part in token_data(100 + step, distribution, 7))
            )
            result = model.train_step(
                *(part[model.rows] for part in token_data(step, distribution))
            )
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
        expected = alone_with_tokens(drawn["tied"], distribution, kind)
        for numbers, gradients, parameters in world.run(
            token_errors, drawn, distribution, kind, expected, size=ranks_of(drawn)
        ):
            assert numbers < 1e-9, (numbers, distribution, kind, drawn)
            assert gradients < 1e-9, (gradients, distribution, kind, drawn)
            assert parameters < 1e-6, (parameters, distribution, kind, drawn)


# Slices of equal and of other lengths, more than there are tokens, and a chunk of the head alone.
SLICES: list[dict[str, Any]] = [
    {"logits_slices": 4, "microbatch_size": 2},
    {"logits_slices": 99, "tied": True, "recompute": "full", "loss_fn": huggingface.token_loss},
    {"logits_slices": 2, "pp": 2, "chunks": 2, "tied": True},
    {"logits_slices": 3, "pp": 2, "chunks": 3, "shard": 2, "gradient_parts": 3},
    {"logits_slices": 4, "shard": 2, "chunks": 6, "unit": 2, "split_backward": False},
    {"logits_slices": 5, "replicate": 2, "replicate_zero": 1, "merged_microbatches": 2, "unit": 4},
]


@pytest.mark.parametrize("degrees", SLICES)
def test_slices_of_logits_are_one_process(world: World, degrees: dict[str, Any]) -> None:
    """Ignored labels are other shares of every slice."""
    expected = alone_with_tokens(degrees.get("tied", False), "any")
    asked = {"microbatch_size": 1, **degrees}
    for numbers, gradients, parameters in world.run(
        token_errors, asked, "any", "sgd", expected, size=ranks_of(degrees)
    ):
        assert max(numbers, gradients) < 1e-9, (numbers, gradients)
        assert parameters < 1e-6


@on_ranks(1)
def test_outputs_of_an_evaluation_in_slices_are_those_of_all_tokens() -> None:
    tokens, targets = token_data(0, "any")
    found = []
    for slices in (1, 4):
        with with_tokens(logits_slices=slices, microbatch_size=2) as model:
            loss, outputs = model.eval_step(tokens, targets, outputs=lambda logits: logits)
            found += [
                (torch.tensor(loss), outputs),
                (torch.tensor(loss), model.forward_only(tokens)),
            ]
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-12, atol=1e-12)


@on_ranks(2)
def test_bf16_is_near() -> None:
    loss, norm, _ = alone_with_tokens(False, "any").numbers[0]
    given: dict[str, Any] = {"sample": token_data(0, "any")[0][:2], "global_batch": TOKEN_ROWS}
    given |= {"loss_reduction": "tokens", "optimizer": SGD, "precision": "bf16", "pp": 2}
    for slices in (1, 4):
        layers = [layer.float() for layer in token_layers(False)]
        with zeropp.parallelize(layers, token_loss, logits_slices=slices, **given) as model:
            result = model.train_step(*token_data(0, "any"))
        numbers = float(result.loss), float(result.grad_norm)
        assert numbers == pytest.approx((loss, norm), rel=0.02)


class Pooled(nn.Linear):
    """Gives one row of numbers for all tokens."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).mean(1)


@on_ranks(1)
def test_what_slices_of_logits_would_get_wrong_is_refused() -> None:
    tokens, targets = token_data(0, "any")
    given: dict[str, Any] = {"sample": tokens[:1], "global_batch": TOKEN_ROWS, "logits_slices": 4}
    head, pooled = nn.Linear(WIDTH, VOCABULARY), Pooled(WIDTH, VOCABULARY)
    counted = {"loss_reduction": "tokens"}
    wrong: list[tuple[nn.Module, Any, dict[str, Any], str]] = [
        (head, loss_function, {}, "logits_slices=4: a mean of means counts the tokens of some"),
        (pooled, token_loss, counted, "logits_slices=4: inputs are (1, 6), what the last layer"),
        (head, huggingface.label_loss, {}, "loss_fn: shifts labels, which logits_slices=4"),
        (head, partial(huggingface.label_loss), {}, "loss_fn: shifts labels, which logits_slices"),
    ]
    for last, loss, more, words in wrong:
        layers = [nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH), last]
        refuses(
            f"InfeasibleError: {words}",
            partial(zeropp.parallelize, layers, loss, **given, **more),
        )
    with with_tokens(logits_slices=4) as model:
        for call in (model.train_step, model.eval_step):
            refuses(
                "ValueError: targets: (8, 5) are not divided as inputs (8, 6)",
                partial(call, tokens, targets[:, 1:]),
            )
        refuses("", partial(model.train_step, tokens, targets))


@on_ranks(1)
def test_logits_of_a_slice_are_freed_before_its_backward() -> None:
    seen = []

    def total(logits: Tensor, _: Tensor) -> tuple[Tensor, int]:
        held = ref(logits)
        if logits.requires_grad:
            logits.register_hook(lambda _: seen.append(held() is None))  # type: ignore[no-untyped-call]
        return logits.sum(), 1

    with with_tokens(logits_slices=3, microbatch_size=4, loss_fn=total) as model:
        model.train_step(*token_data(0, "any"))
    assert seen == [True] * 6


@on_ranks(1)
def test_slices_need_a_loss_that_is_trained() -> None:
    detached = lambda logits, targets: (token_loss(logits.detach(), targets)[0], 1)  # noqa: E731
    with with_tokens(logits_slices=4, loss_fn=detached) as model:
        words = "RuntimeError: train_step: the loss depends on nothing that is trained"
        refuses(words, partial(model.train_step, *token_data(0, "any")))


@on_ranks(1)
def test_what_is_no_sum_and_count_is_an_error() -> None:
    wrong: list[tuple[Any, str]] = [
        (
            lambda logits, targets: token_loss(logits, targets)[0],
            "gives (), but (sum, count) of a microbatch is needed with",
        ),
        (lambda logits, _: (logits.sum(1), 1), "gives (2, 11), but a tensor of one"),
    ]
    for function, words in wrong:
        step = with_tokens(microbatch_size=2, loss_fn=function).train_step
        refuses(f"TypeError: loss_fn: {words}", partial(step, *token_data(0, "any")))


@on_ranks(2)
def test_a_batch_that_counts_nothing_updates_nothing() -> None:
    with with_tokens(microbatch_size=2, pp=2, loss_fn=lambda logits, _: (logits.sum(), 0)) as model:
        before = dict(model.full_parameters())
        result = model.train_step(*token_data(0, "any"))
        assert not math.isfinite(float(result.loss))
        assert not math.isfinite(model.eval_step(*token_data(0, "any")))
        assert all(torch.equal(before[name], value) for name, value in model.full_parameters())
        assert int(model.skipped_steps) == 1
