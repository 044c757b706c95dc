"""What people's training loops need: sequences of other lengths, losses beside the main one, steps
that are skipped, gradients to read, and one error where ranks call different things."""

from __future__ import annotations

import copy
import os
import time
from datetime import timedelta
from functools import partialmethod
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_saver import save
from torch.nn import functional as F

import zeropp
from tests.gloo.differences import largest
from tests.gloo.small_layers import BATCH, built, data, error_of, linear, seeded, step
from tests.gloo.world import World
from zeropp.engine import errors
from zeropp.engine.flat import FlatParameters
from zeropp.engine.loss import Microbatches
from zeropp.train.parallel_model import ParallelModel

VOCAB, WIDTH = 11, 8
LENGTHS = (5, 9, 5, 3)  # of the steps' sequences
DEGREES: list[dict[str, Any]] = [
    {"pp": 2, "chunks": 2},
    {"pp": 2, "shard": 2},
    {"replicate": 2, "replicate_zero": 1},
]


class Block(nn.Module):
    """A residual layer with a loss of its own beside its output."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = x + self.linear(x).tanh()
        return y, 0.1 * y.square().mean()


def made() -> list[nn.Module]:
    """Layers, equal on every rank."""
    torch.manual_seed(1)
    ends = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
    return [layer.double() for layer in (ends[0], Block(), Block(), Block(), Block(), ends[1])]


def loss_function(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean over tokens."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def tokens(number: int) -> tuple[Tensor, Tensor]:
    """A global batch, with the length of its step."""
    generator = torch.Generator().manual_seed(number)
    both = torch.randint(VOCAB, (2, BATCH, LENGTHS[number]), generator=generator)
    return both[0], both[1]


def alone() -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Losses, parameters and the last step's gradients in one process."""
    model, losses = nn.ModuleList(copy.deepcopy(made())), []
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
            loss = (loss_function(x, y) + beside) / BATCH
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        losses.append(total)
        optimizer.step()
    parameters = {name: one.detach() for name, one in model.named_parameters()}
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return losses, parameters, gradients


def parallel(degrees: dict[str, Any], **more: Any) -> ParallelModel:
    """The layers on this rank."""
    return zeropp.parallelize(
        made(), loss_function, sample=tokens(0)[0][:1], global_batch=BATCH,
        optimizer=lambda groups: torch.optim.AdamW(groups["all"], lr=0.01), **degrees, **more,
    )  # fmt: skip


def train(
    degrees: dict[str, Any],
) -> tuple[list[float], float, dict[str, Tensor], dict[str, Tensor]]:
    """Losses, that of an evaluation of the last batch's rows before its step, and what the rank
    has of parameters and gradients."""
    with parallel(degrees) as model:
        losses = []
        x, y = (part[model.rows][:1] for part in tokens(0))
        model.engine.warm_up(Microbatches([x], [y]))
        for number in range(len(LENGTHS)):
            inputs, targets = tokens(number)
            evaluated = model.eval_step(inputs[model.rows], targets[model.rows])
            losses.append(float(model.train_step(inputs[model.rows], targets[model.rows]).loss))
        return losses, evaluated, dict(model.full_parameters()), dict(model.gradients())


@pytest.mark.parametrize("degrees", DEGREES, ids=str)
def test_other_lengths_and_losses_beside_the_main_one(
    world: World, degrees: dict[str, Any]
) -> None:
    expected, parameters, gradients = alone()
    size = degrees.get("pp", 1) * degrees.get("shard", 1) * degrees.get("replicate", 1)
    names: set[str] = set()
    for losses, evaluated, found, sums in world.run(train, degrees, size=size):
        assert losses == pytest.approx(expected, rel=1e-12)
        assert evaluated == pytest.approx(expected[-1], rel=1e-12)
        names |= set(sums)
        apart = [float((found[name] - parameters[name].float()).abs().max()) for name in found]
        apart += [float((sums[name] - gradients[name]).abs().max()) for name in sums]
        assert largest(apart) < 1e-6
    assert names == set(gradients)


def train_apart() -> tuple[list[float], list[float]]:
    """Losses of two replicas whose sequences have different lengths, and those of one process."""
    generator = torch.Generator().manual_seed(4)
    x, y = torch.randn(2, BATCH, 3, WIDTH, generator=generator, dtype=torch.float64)
    alone = nn.Sequential(*seeded([linear] * 2))
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    model = built(seeded([linear] * 2), sample=x[:1], replicate=2)
    found, expected = [], []
    for lengths in ((2, 3), (3, 2), (2, 2)):
        mine = lengths[dist.get_rank()]
        found.append(float(model.train_step(x[model.rows, :mine], y[model.rows, :mine]).loss))
        halves = zip(x.chunk(2), y.chunk(2), lengths, strict=True)
        losses = [F.mse_loss(alone(a[:, :length]), b[:, :length]) for a, b, length in halves]
        loss = torch.stack(losses).mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        expected.append(float(loss.detach()))
    return found, expected


def test_replicas_may_have_sequences_of_different_lengths(world: World) -> None:
    for found, expected in world.run(train_apart, size=2):
        assert found == pytest.approx(expected, rel=1e-12)


def skip(fused: bool) -> list[float]:
    """Norms of four steps of which the second has infinite targets on one rank, how many were
    skipped, and the distance from a model that was never given that step."""
    kinds = [linear] * 4
    optimizer = lambda groups: torch.optim.AdamW(groups["all"], lr=0.1, fused=fused)  # noqa: E731
    models = [built(seeded(kinds), shard=2, optimizer=optimizer) for _ in range(2)]
    norms, states = [], []
    for model, steps in zip(models, ((0, 1, 2, 3), (0, 2, 3)), strict=True):
        for number in steps:
            inputs, targets = (part[model.rows].clone() for part in data(number))
            if number == 1 and dist.get_rank() == 1:
                targets[0] = torch.inf
            norms.append(float(model.train_step(inputs, targets).grad_norm))
        states.append(dict(model.full_parameters()))
    apart = [float((states[0][name] - one).abs().max()) for name, one in states[1].items()]
    return [*norms[:4], float(models[0].skipped_steps), largest(apart)]


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_without_finite_gradients_is_skipped_on_all_ranks(world: World, fused: bool) -> None:
    first, second = world.run(skip, fused, size=2)
    assert first[2:] == second[2:]
    norm, lost, *norms, skipped, apart = first
    assert not torch.isfinite(torch.tensor(lost))
    assert torch.isfinite(torch.tensor([norm, *norms])).all()
    assert (skipped, apart) == (1.0, 0.0)


def skip_all(place: Path) -> tuple[set[float], float]:
    """The numbers of steps in the optimizer's state after one step that was skipped, and the
    distance of a model that goes on from its checkpoint from one that begins."""
    optimizer = lambda groups: torch.optim.NAdam(groups["all"], lr=0.1)  # noqa: E731
    models = [built(seeded([linear] * 4), shard=2, optimizer=optimizer) for _ in range(3)]
    inputs, targets = (part[models[0].rows] for part in data(0))
    models[0].train_step(inputs, torch.full_like(targets, torch.inf))
    state = models[0].state_dict()["optimizer"]
    models[0].save(place)
    models[1].load(place)
    for model in models[1:]:
        model.train_step(inputs, targets)
    loaded, new = (dict(model.full_parameters()) for model in models[1:])
    assert float(models[1].skipped_steps) == 1
    return (
        {float(value) for name, value in state.items() if name.endswith(".step")},
        largest([float((loaded[name] - one).abs().max()) for name, one in new.items()]),
    )


def test_an_optimizer_that_has_only_skipped_steps_has_not_begun(
    world: World, tmp_path: Path
) -> None:
    assert world.run(skip_all, tmp_path / "skipped", size=2) == [({0.0}, 0.0)] * 2


def go_on_uncounted(place: Path) -> tuple[list[float], float]:
    """Two models that have skipped a step read a checkpoint and a state dict that do not count
    skipped steps: how many are then counted, and how far they are, after one step more, from the
    model that was saved."""
    optimizer = lambda groups: torch.optim.NAdam(groups["all"], lr=0.1)  # noqa: E731
    models = [built(seeded([linear] * 4), shard=2, optimizer=optimizer) for _ in range(3)]
    inputs, targets = (part[models[0].rows] for part in data(0))
    models[0].train_step(inputs, targets)
    for model in models[1:]:
        model.train_step(inputs, torch.full_like(targets, torch.inf))
    state = models[0].state_dict()
    del state["skipped_steps"]
    save({"model": state}, checkpoint_id=str(place))
    models[1].load(place)
    models[2].load_state_dict(state)
    skipped = [float(model.skipped_steps) for model in models]
    for model in models:
        model.train_step(inputs, targets)
    saved, *others = (dict(model.full_parameters()) for model in models)
    apart = [
        float((other[name] - one).abs().max()) for other in others for name, one in saved.items()
    ]
    return skipped, largest(apart)


def test_a_checkpoint_that_counts_no_skipped_steps_has_none(world: World, tmp_path: Path) -> None:
    assert world.run(go_on_uncounted, tmp_path / "old", size=2) == [([0.0] * 3, 0.0)] * 2


def sums_in_warm_up() -> tuple[int, int]:
    """How many of two chunks have gradients at once while kernels are warmed up, and afterwards."""
    engine = built(seeded([linear] * 4), pp=2, chunks=2, weights=[1.0] * 4).engine
    make, held = FlatParameters.make_gradients, []

    def count() -> int:
        chunks = engine.chunks.values()
        return sum(any(flat.gradient() is not None for flat in one.flats) for one in chunks)

    def make_and_count(flat: FlatParameters) -> None:
        make(flat)
        held.append(count())

    inputs, targets = ([part[:1]] for part in data(0))
    with mock.patch.object(FlatParameters, "make_gradients", make_and_count):
        engine.warm_up(Microbatches(inputs, targets))
    assert len(engine.chunks) == 2
    return max(held), count()


def test_a_warm_up_holds_the_gradients_of_one_chunk_at_a_time(world: World) -> None:
    assert world.run(sums_in_warm_up, size=2) == [(1, 0)] * 2


def warm_up() -> tuple[list[int], list[str]]:
    """How often kernels were warmed up after batches of several shapes, as on a GPU, and what the
    model says once that has failed."""
    engine = built(seeded([linear] * 2), shard=2).engine
    calls, said = [], []
    with (
        mock.patch.object(engine, "_device", torch.device("cuda")),
        mock.patch.object(engine, "warm_up") as warmed,
    ):

        def agree(rows: int) -> None:
            inputs, targets = ([part[:rows]] for part in data(0))
            engine.agree("train_step", lambda: Microbatches(inputs, targets))

        for rows in (1, 1, 2, 1):
            agree(rows)
            calls.append(warmed.call_count)
        warmed.side_effect = RuntimeError("no memory")
        for _ in range(2):
            with pytest.raises(RuntimeError) as error:
                agree(3)
            said.append(str(error.value))
    return calls, said


def test_kernels_are_warmed_up_for_every_shape_and_a_failure_is_one_of_a_step(world: World) -> None:
    for calls, (first, second) in world.run(warm_up, size=2):
        assert calls == [1, 1, 2, 2]
        assert first == "no memory"
        assert second.startswith("an earlier step raised RuntimeError: no memory; create a new")


class Dropping(nn.Module):
    """A linear layer with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.drop(self.linear(x))
        return y.tanh()


def dropped(compiles: bool) -> list[float]:
    """Losses with dropout, of which each data-parallel rank and each step has masks of its own."""
    in_python = partialmethod(nn.Module.compile, backend="aot_eager")
    with mock.patch.object(nn.Module, "compile", in_python):
        layers = seeded([linear, Dropping, Dropping, linear])
        with built(layers, shard=2, compile=compiles) as model:
            return [step(model, number) for number in range(3)]


def test_compiled_dropout_draws_what_eager_dropout_does(world: World) -> None:
    eager, compiled = (world.run(dropped, compiles, size=2)[0] for compiles in (False, True))
    assert compiled == pytest.approx(eager, rel=1e-12)


def apart(told: Path) -> dict[str, str]:
    """What ranks say that call different methods, give other lengths, or come late: rank 1 waits
    until rank 0 has told of it by making a file."""
    found = {}
    with (
        mock.patch.dict(os.environ, {"TORCH_GLOO_LAZY_INIT": "0"}),  # else who is late is unknown
        parallel({"pp": 2}, timeout=timedelta(seconds=8)) as model,
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
    first, second = world.run(apart, tmp_path / "told", size=2)
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
