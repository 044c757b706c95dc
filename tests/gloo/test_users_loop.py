"""What a training loop of a user's own may do: functions that keep things, labels of transformers,
keyword inputs by ``**kwargs``, rows and values that differ between ranks; and models made from the
same layers, on a user's device."""

from __future__ import annotations

import copy
import os
import pickle
import random
import signal
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing._internal.two_tensor import TwoTensor

import zeropp
from tests.gloo.layers import ROWS, WIDTH, Calling, Kind, One, Scale, frozen, linear
from tests.gloo.models import (
    apart,
    built,
    data,
    error_of,
    refuses,
    seeded,
    step,
    steps,
    trained_alone,
)
from tests.gloo.world import WorkerError, World, on_ranks
from tests.waiting import wait_until
from zeropp import huggingface
from zeropp.engine.ranks import errors
from zeropp.train.parallel_model import ParallelModel

MICROBATCH, STEPS = 3, 3
SHORT = timedelta(seconds=10)
CALLS, NOTED = 0, list[float]()
sgd: Callable[..., Any] = lambda groups: torch.optim.SGD(groups["all"], lr=0.2)  # noqa: E731


def shifting() -> nn.Module:
    """Changes its input in place, as a first layer may."""
    return Calling(lambda x: x.sub_(0.5).mul_(2))


class Moving(nn.Module):
    """Changes buffers in every forward (no checkpoint has the first one), counts them, and draws by
    Python's generator, which ``fresh`` seeds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(WIDTH, WIDTH), 0
        self.register_buffer("mean", torch.zeros(WIDTH), persistent=False)
        self.register_buffer("seen", torch.zeros(WIDTH))
        self.history: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        self.get_buffer("mean").mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
        self.seen = 0.9 * self.get_buffer("seen") + y.detach().mean(0)
        self.calls += 1
        self.history.append(y.detach().mean(0))
        scale = min(1.0, self.calls / 20) + 0.01 * random.random()
        return y * scale - self.get_buffer("mean") - 0.1 * self.get_buffer("seen")


class Scaled:
    """A loss that keeps counters, tensors and a generator of its own."""

    def __init__(self) -> None:
        self.calls, self.generator = 0, random.Random(3)
        self.mean = torch.zeros(())

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        global CALLS
        self.calls += 1
        CALLS += 1
        NOTED.append(0.0)
        loss = F.mse_loss(output, target)
        self.mean.mul_(0.5).add_(loss.detach(), alpha=0.5)
        if output.requires_grad:  # it is a step, and no evaluation
            output.register_hook(lambda gradient: gradient.clamp(max=0.01))  # type: ignore[no-untyped-call]
            (gradient,) = torch.autograd.grad(loss, output, create_graph=True)
            loss = loss + 0.0 * gradient.mean()
        return loss * (self.calls + CALLS + len(NOTED) + self.generator.random() + self.mean) / 30


def changing() -> Callable[[Tensor, Tensor], Tensor]:
    """A loss that changes targets and outputs in place, and counts its calls in a closure."""
    calls, noted = 0, [0]

    def loss(output: Tensor, target: Tensor) -> Tensor:
        nonlocal calls
        calls, noted[0] = calls + 1, noted[0] + 1
        target -= 1
        output = output.sub_(output.detach().mean())
        return F.mse_loss(output, target) * min(1.0, (calls + noted[0]) / 40)

    return loss


LOOPS: dict[str, tuple[list[Callable[[], nn.Module]], Callable[[], Any]]] = {
    "in place": ([shifting, linear, linear], lambda: F.mse_loss),
    "buffers": ([linear, Moving, linear], lambda: F.mse_loss),
    "closure": ([linear, linear, linear], changing),
    "object": ([linear, linear, linear], Scaled),
}


def fresh() -> None:
    """What loops keep outside of their layers, as before the first one."""
    global CALLS
    CALLS = 0
    NOTED.clear()
    random.seed(5)


def plain(name: str) -> list[float]:
    """The losses of a loop in one process."""
    fresh()
    kinds, make = LOOPS[name]
    layers = [layer.float() for layer in seeded(kinds)]
    batches = ((x.float(), y.float()) for x, y in map(data, range(STEPS)))
    return trained_alone(layers, batches, partial(torch.optim.SGD, lr=0.2), MICROBATCH, make())[1]


def trained(name: str, pp: int) -> list[float]:
    """The losses of the same loop with evaluations in it."""
    fresh()
    kinds, make = LOOPS[name]
    layers = [layer.float() for layer in seeded(kinds)]
    inputs, targets = (part.float() for part in data(0))
    losses = []
    with zeropp.parallelize(
        layers, make(), sample=inputs[:MICROBATCH], global_batch=ROWS, pp=pp, optimizer=sgd
    ) as model:
        for step in range(STEPS):
            if isinstance(layers[1], Moving):
                model.eval_step(inputs.clone() + 3, targets.clone())
                model.forward_only(inputs.clone())
            inputs, targets = (part.float() for part in data(step))
            losses.append(float(model.train_step(inputs, targets).loss))
    return losses


@pytest.mark.parametrize("pp", [1, 2])
def test_a_loop_is_that_of_one_process(world: World, pp: int) -> None:
    for name in LOOPS:
        for losses in world.run(trained, name, pp, size=pp):
            assert losses == pytest.approx(plain(name), rel=1e-5), name


# Labels.

VOCABULARY, LENGTH = 19, 6


class Head(nn.Module):
    """From a token to logits of the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.table(tokens)
        return logits


@on_ranks(1)
def test_labels_are_shifted_by_name_and_refused_otherwise() -> None:
    torch.manual_seed(0)
    tokens = torch.randint(1, VOCABULARY, (8, LENGTH))
    labels = tokens.clone()
    labels[:, :2] = -100  # a prompt

    def said(loss_fn: Any, targets: Tensor, inputs: Tensor = tokens) -> str:
        torch.manual_seed(1)
        with zeropp.parallelize([Head()], loss_fn, sample=tokens[:2], global_batch=8) as model:
            error = error_of(lambda: losses.append(float(model.train_step(inputs, targets).loss)))
            assert model.steps_done == (not error)
        return error

    losses: list[float] = []
    following = F.pad(labels[:, 1:], (0, 1), value=-100)
    for loss_fn, targets in (
        (huggingface.label_loss, labels),
        (huggingface.token_loss, following),
    ):
        assert said(loss_fn, targets) == ""
    torch.manual_seed(1)
    expected = F.cross_entropy(Head()(tokens)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    assert losses == pytest.approx([float(expected)] * 2)
    assert "label_loss, which shifts" in said(huggingface.token_loss, labels)
    assert "label_loss, which shifts" in said(huggingface.token_loss, tokens)
    assert "shifted twice" in said(huggingface.label_loss, following)
    same = torch.full_like(tokens, 3)  # a token that follows itself
    assert said(huggingface.token_loss, same, same) == ""
    assert said(huggingface.label_loss, same, same) == ""


# What ranks are given.


class Reads(One):
    """Reads a keyword input that it does not name."""

    def forward(self, x: Tensor, **more: Tensor) -> Tensor:
        return self.linear(x) * more.get("mask", 1.0)


class Hands(nn.Module):
    """Hands keyword inputs on to what names one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Reads()

    def forward(self, x: Tensor, **more: Tensor) -> Tensor:
        return self.by_name(x, **more)

    def by_name(self, x: Tensor, mask: Tensor) -> Tensor:
        """Takes no other keyword."""
        output: Tensor = self.inner(x, mask=mask)
        return output


MASK = (torch.arange(ROWS * WIDTH).view(ROWS, WIDTH) % 3 > 0).double()


def by_keywords(kind: str) -> float:
    """The loss of a step with a mask that only ``**kwargs`` name."""

    def weighted(output: Tensor, target: Tensor, **more: Tensor) -> Tensor:
        return F.mse_loss(output * more.get("mask", 1.0), target)

    last: dict[str, Kind] = {"layer": Reads, "handed on": Hands, "loss": linear}
    loss_fn = weighted if kind == "loss" else F.mse_loss
    named = {"mask": MASK[:1]}
    with built(seeded([linear, last[kind]]), loss_fn=loss_fn, sample_keywords=named) as model:
        return float(model.train_step(*data(), mask=MASK).loss)


@on_ranks(1)
def test_keyword_inputs_reach_those_who_read_them_by_kwargs() -> None:
    inputs, targets = data()
    model = nn.Sequential(*seeded([linear, linear]))
    expected = float(F.mse_loss(model(inputs) * MASK, targets))
    for kind in ("layer", "handed on", "loss"):
        assert by_keywords(kind) == pytest.approx(expected), kind


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("buffer", "layers[1]: 'order' is not the same on ranks 0 and 1"),
        ("order in a row", "'targets' is not the same on ranks [0, 1]"),
        ("pairs", "'targets' is not the same on ranks [0, 1]"),
        ("same rows", "all data-parallel ranks were given the same rows"),
        ("one row", "all data-parallel ranks were given the same rows"),
        ("right", ""),
        ("constant", ""),
    ],
)
@on_ranks(2)
def test_what_differs_between_ranks_is_refused(what: str, expected: str) -> None:
    """By the call or the first step, where rank 1 differs from rank 0."""
    rank = dist.get_rank()
    layers = seeded([linear, linear])
    inputs, targets = data()
    pp = 1 if what in ("buffer", "same rows", "one row") else 2

    def work() -> None:
        if what == "buffer":
            generator = torch.Generator().manual_seed(rank)
            # A permutation, whose sums are those of any other.
            layers[1].register_buffer("order", torch.randperm(WIDTH, generator=generator))
        size = ROWS if what != "one row" else 2
        with built(layers, pp=pp, shard=2 // pp, global_batch=size) as model:
            rows = model.rows if what == "right" else slice(0, model.rows.stop - model.rows.start)
            x, y = inputs[rows].clone(), targets[rows].clone()
            if what == "order in a row" and rank:
                y = y.flip(1)
            if what == "pairs" and rank:
                y[0, :2], y[1, :2] = y[0, :2].flip(0), y[1, :2].flip(0)
            model.train_step(torch.ones_like(x) if what == "constant" else x, y)

    said = error_of(work)
    assert expected in said if expected else said == ""


# Faults.


@on_ranks(1)
def test_a_weight_that_is_made_of_others_is_named() -> None:
    layer = nn.Linear(WIDTH, WIDTH)
    made: Any = TwoTensor
    layer.weight = nn.Parameter(made(torch.ones(8, 8), torch.ones(8, 8)), requires_grad=False)
    said = error_of(lambda: built([layer, *seeded([linear])]))
    assert "layers[0]: 'weight' is TwoTensor, but a plain parameter is needed" in said


def dying(place: Path) -> None:
    """Rank 1 ends between two steps, or in the middle of one; the others write what they say."""
    layers: list[Any] = seeded([linear] * 4)
    died = [0]
    if place.name == "in a step" and dist.get_rank() == 1:
        layers[3].register_forward_hook(
            lambda module, *_: os._exit(1) if module.training and len(died) > 1 else None
        )
    model = built(layers, pp=2)
    inputs, targets = data()
    model.train_step(inputs, targets)
    died.append(1)
    ready = place.parent / "ready"
    if dist.get_rank() == 0:
        ready.touch()
    wait_until(ready.exists, "rank 0 has made a step")
    if dist.get_rank() == 1 and place.name == "between":
        os._exit(1)
    said = error_of(lambda: model.train_step(inputs, targets))
    (place.parent / f"{place.name} {dist.get_rank()}").write_text(said)


@pytest.mark.parametrize("where", ["between", "in a step"])
def test_peers_of_a_dead_rank_say_so_in_one_line(world: World, where: str, tmp_path: Path) -> None:
    with pytest.raises(WorkerError):
        world.run(dying, tmp_path / where, size=2, timeout_s=60)
    said = (tmp_path / f"{where} 0").read_text()
    assert said.startswith("LostRankError: lost the connection to a rank, or it did not come")
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize("words", ["closed by peer", "reset by peer", "Broken pipe"])
@on_ranks(2)
def test_a_rank_that_has_ended_is_not_waited_for(words: str) -> None:
    lost = mock.Mock(side_effect=RuntimeError(f"[pair.cc:547] Connection: {words}"))
    undo = ExitStack()
    barrier = errors.ErrorBarrier(None, 0, undo)
    waits = mock.patch.object(dist, "monitored_barrier", side_effect=AssertionError)
    with mock.patch.object(errors, "all_gather_single", lost), waits:
        said = error_of(lambda: barrier.exchange([1]))
    undo.close()
    assert said.startswith("LostRankError: lost the connection to a rank")


@pytest.mark.parametrize("rank", [0, 1])
@on_ranks(2)
def test_a_signal_to_one_rank_ends_all_with_a_checkpoint(rank: int, tmp_path: Path) -> None:
    model, status = built(pp=2), 0
    model.save_on_signal(tmp_path / "checkpoint")
    try:
        for number in range(5):
            if number == 2 and dist.get_rank() == rank:
                os.kill(os.getpid(), signal.SIGTERM)
            step(model, number)
    except SystemExit as end:
        status = int(str(end.code))
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    assert (model.steps_done, status) == (3, 128 + signal.SIGTERM)
    model.close()
    with built(shard=2) as other:
        other.load(tmp_path / "checkpoint")
        assert other.steps_done == 3


def save_in_a_hook(model: ParallelModel, folder: Path) -> None:
    model.optimizer.register_step_post_hook(lambda *_: model.save(folder))
    step(model)


def add_parameters(model: ParallelModel, folder: Path) -> None:
    model.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})


def schedule_with(factor: float) -> Callable[[ParallelModel, Path], None]:
    def run(model: ParallelModel, folder: Path) -> None:
        model.engine.updater.lr_schedule = lambda step: factor
        step(model)

    return run


NOT_SEEN: list[tuple[Callable[[ParallelModel, Path], None], str]] = [
    (save_in_a_hook, "RuntimeError: save: a step is under way (call it between steps)"),
    (add_parameters, "AttributeError: optimizer.add_param_group: no rank has other parameters"),
    (schedule_with(-1.0), "InfeasibleError: lr_schedule: gives -1.0 after 0 steps"),
    (schedule_with(float("nan")), "InfeasibleError: lr_schedule: gives nan after 0 steps"),
]


@on_ranks(2)
def test_what_a_loop_does_and_no_step_would_see_is_refused(tmp_path: Path) -> None:
    for call, words in NOT_SEEN:
        refuses(words, partial(call, built(shard=2), tmp_path))


@on_ranks(2)
def test_a_schedule_that_counts_its_calls_is_called_once_a_step() -> None:
    calls: list[int] = []

    def schedule(number: int) -> float:
        calls.append(number)
        return 1 / len(calls)

    steps(built(shard=2, lr_schedule=schedule), 0, 1)
    assert calls == [0, 1]


@on_ranks(2)
def test_layers_belong_to_one_model_until_it_is_closed() -> None:
    layers = seeded([linear] * 4)
    with built(layers, pp=2) as first:
        found = [step(first, 0)]
        refuses(
            "InfeasibleError: layers[0]: 'weight' belongs to another model that",
            lambda: built(layers, pp=2),
        )
        found.append(step(first, 1))
        others = nn.ModuleList(layers[2:] if dist.get_rank() == 0 else layers[:2])
        assert all(one.isnan().all() for one in others.parameters())  # not the first values
    words = "RuntimeError: this model was closed (create a new model, and load a checkpoint)"
    assert error_of(lambda: step(first)) == error_of(first.full_state_dict) == words
    with built(layers, pp=2) as again:
        found += steps(again, 2, 3)
    with built(pp=2) as alone:
        assert found == steps(alone, 0, 1, 2, 3)
    assert len(set(found)) == 4


@on_ranks(2)
def test_a_model_that_a_peer_has_refused_keeps_no_layers() -> None:
    taken, new = seeded([linear] * 2), seeded([linear])
    with built(taken, pp=2):
        refuses(
            "InfeasibleError: layers[1]: 'weight' belongs to another model that",
            lambda: built([new[0], taken[1]], pp=2),
        )
    with built([new[0], taken[1]], pp=2) as model:
        assert step(model) > 0


@pytest.mark.parametrize(("kind", "parameter"), [(linear, "weight"), (Scale, "scale")])
@on_ranks(2)
def test_layers_without_values_are_refused(kind: Kind, parameter: str) -> None:
    """Those that an earlier model, now closed, has sharded, and copies that were taken of them
    between its steps."""
    layers = seeded([kind] * 4)
    with built(layers, shard=2) as first:
        step(first)
        copies = copy.deepcopy(layers)
    for said in map(error_of, (partial(built, layers, shard=2), partial(built, copies, pp=2))):
        assert said.startswith(f"InfeasibleError: layers[0]: '{parameter}' has no values"), said
        assert "\n" not in said


@pytest.mark.parametrize("degrees", [{"shard": 2}, {"shard": 2, "chunks": 2}], ids=str)
@on_ranks(2)
def test_sharded_layers_can_be_read_between_steps(degrees: dict[str, Any]) -> None:
    """They are NaN to whoever reads or copies them, and the losses are as where nobody does."""
    layers, found = seeded([linear] * 4), []
    with built(layers, **degrees) as model:
        for number in range(3):
            found.append(step(model, number))
            for one in (*copy.deepcopy(layers), *layers):
                assert all(parameter.isnan().all() for parameter in one.parameters())
            model.eval_step(*(part[model.rows] for part in data(9)))
    with built(**degrees) as model:
        assert found == steps(model, 0, 1, 2)
    assert len(set(found)) == 3


UNTRAINED: dict[str, list[Kind]] = {
    "all frozen": [frozen] * 4,
    "no parameters": [nn.Tanh] * 4,
    "detached": [linear, lambda: Calling(lambda x: x.detach().tanh()), frozen, frozen],
}


@pytest.mark.parametrize("name", UNTRAINED)
@on_ranks(1)
def test_a_loss_that_depends_on_nothing_trained(name: str) -> None:
    with built(seeded(UNTRAINED[name])) as model:
        assert model.eval_step(*data()) > 0
        assert "the loss depends on nothing that is trained" in error_of(lambda: step(model))


@on_ranks(4)
def test_a_ranks_own_rows() -> None:
    with built(pp=2, shard=2) as model:
        step(model)
        assert model.data_parallel_size == 2
        assert model.data_parallel_rank == dist.get_rank() % 2
        first = ROWS // 2 * model.data_parallel_rank
        assert (model.rows.start, model.rows.stop) == (first, first + ROWS // 2)


@on_ranks(2)
def test_a_cpu_with_an_index_is_the_cpu() -> None:
    losses = []
    for device in ("cpu:0", "cpu"):
        with built(pp=2, device=device) as model:
            losses.append(step(model))
    assert losses[0] == losses[1] > 0


@on_ranks(2)
def test_a_rank_whose_peer_raises_waits_no_longer_than_told() -> None:
    model = built(pp=2, timeout=timedelta(seconds=5))
    inputs, targets = data()
    assert error_of(lambda: model.train_step(inputs[:, :3], targets))  # in the first stage
    refuses("RuntimeError: an earlier step raised", lambda: model.train_step(inputs, targets))


class Drawn(nn.Linear):
    """Draws its weights by the generators of torch, Python and numpy."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH, dtype=torch.float64)
        with torch.no_grad():
            self.weight[0] = random.random()
            self.weight[1] = float(np.random.rand())


def first_values(degrees: dict[str, Any]) -> dict[str, Tensor]:
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)
    with built([Drawn] * 4, **degrees) as model:
        return dict(model.full_parameters())


def test_functions_draw_the_same_weights_in_every_topology(world: World) -> None:
    right: dict[str, Tensor] = world.run(first_values, {}, size=1)[0]
    for degrees in ({"pp": 2}, {"shard": 2, "chunks": 2}):
        found: dict[str, Tensor] = {}
        for part in world.run(first_values, degrees, size=2):
            found |= part
        assert apart(found, right) == 0.0
    weights = [right[f"{index}.weight"] for index in range(4)]
    assert not any(
        torch.equal(weights[0][row], one[row]) for one in weights[1:] for row in (0, 1, 2)
    )


@on_ranks(1)
def test_a_model_is_not_copied() -> None:
    with built() as model:
        for copied in (copy.copy, copy.deepcopy, pickle.dumps):
            refuses("TypeError: a model of parallelize has process groups", partial(copied, model))


class TwoInTraining(nn.Linear):
    """Gives two tensors in training mode alone."""

    def forward(self, x: Tensor) -> Any:
        return (super().forward(x), x) if self.training else super().forward(x)


class TakesOneOrTwo(nn.Linear):
    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        return super().forward(x) if y is None else super().forward(x) + y


@on_ranks(2)
def test_other_outputs_in_evaluation_are_refused_with_the_cause() -> None:
    kinds: list[type[nn.Linear]] = [TwoInTraining, TakesOneOrTwo]
    model = built([kind(WIDTH, WIDTH, dtype=torch.float64) for kind in kinds], pp=2, timeout=SHORT)
    said = error_of(partial(step, model))
    assert "may not depend on values or on the mode" in said or "LostRankError" in said
    assert sum("on the mode" in one for one in errors.gathered(said)) == 1


class Evaluated(torch.optim.SGD):
    """Has other values in evaluations."""

    def eval(self) -> None:
        """Go over to them."""


@on_ranks(2)
def test_an_optimizer_that_changes_what_no_rank_has_between_steps_is_refused() -> None:
    given: dict[str, Any] = {"optimizer": lambda groups: Evaluated(groups["all"], lr=0.1)}
    words = "InfeasibleError: optimizer: Evaluated has an eval(), which changes"
    refuses(words, partial(built, shard=2, **given))
    built(shard=2, elementwise=True, **given).close()
