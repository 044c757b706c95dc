"""What people's training loops need: sequences of other lengths, losses beside the main one, steps
that are skipped, gradients to read, and one error where ranks call different things."""

from __future__ import annotations

import math
import os
import time
from datetime import timedelta
from functools import cache, partialmethod
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_saver import save
from torch.nn import functional as F

from tests.gloo.cases import loss_function
from tests.gloo.layers import ROWS, WIDTH, One, linear
from tests.gloo.models import adamw, apart, built, data, error_of, ranks_of, seeded, steps
from tests.gloo.world import World, on_ranks
from zeropp.engine.loss import Microbatches
from zeropp.engine.parameters.flat import FlatParameters
from zeropp.engine.ranks import errors
from zeropp.train.parallel_model import ParallelModel

VOCAB = 11
LENGTHS = (5, 9, 5, 3)  # of the steps' sequences
DEGREES: list[dict[str, Any]] = [
    {"pp": 2, "chunks": 2},
    {"pp": 2, "shard": 2},
    {"replicate": 2, "replicate_zero": 1},
]


class Block(One):
    """A residual layer with a loss of its own beside its output."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = x + self.linear(x).tanh()
        return y, 0.1 * y.square().mean()


def made() -> list[nn.Module]:
    """Layers, equal on every rank."""
    first, last = (lambda: nn.Embedding(VOCAB, WIDTH)), (lambda: nn.Linear(WIDTH, VOCAB))
    return seeded([first, Block, Block, Block, Block, last])


def tokens(number: int) -> tuple[Tensor, Tensor]:
    """A global batch, with the length of its step."""
    generator = torch.Generator().manual_seed(number)
    both = torch.randint(VOCAB, (2, ROWS, LENGTHS[number]), generator=generator)
    return both[0], both[1]


@cache
def alone() -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Losses, parameters and the last step's gradients in one process."""
    model, losses = nn.ModuleList(made()), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for number in range(len(LENGTHS)):
        optimizer.zero_grad()
        total = 0.0
        for x, y in zip(*(part[:, None] for part in tokens(number)), strict=True):
            beside = torch.zeros((), dtype=torch.float64)
            for layer in model:
                x = layer(x)
                if isinstance(x, tuple):
                    x, more = x
                    beside = beside + more
            loss = (loss_function(x, y) + beside) / ROWS
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        losses.append(total)
        optimizer.step()
    parameters = {name: one.detach() for name, one in model.named_parameters()}
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return losses, parameters, gradients


def parallel(degrees: dict[str, Any], **more: Any) -> ParallelModel:
    """The layers on this rank."""
    given: dict[str, Any] = {"loss_fn": loss_function, "sample": tokens(0)[0][:1]}
    return built(made(), optimizer=adamw, **given, **degrees, **more)


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


def not_together(told: Path) -> dict[str, str]:
    """What ranks say that call different methods, give other lengths, or come late: rank 1 waits
    until rank 0 has told of it by making a file."""
    found = {}
    with (
        mock.patch.dict(os.environ, {"TORCH_GLOO_LAZY_INIT": "0"}),  # else who is late is unknown
        parallel({"pp": 2}, timeout=timedelta(seconds=5)) as model,
        mock.patch.object(errors, "_REPORT", timedelta(seconds=2)),
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
        if dist.get_rank() == 1:
            while not told.exists():
                time.sleep(0.1)
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
