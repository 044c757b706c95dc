"""The model as a ``Stateful`` of torch.distributed.checkpoint: what it saves, who can read it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.checkpoint.stateful import Stateful

from tests.gloo.layers import ROWS, WIDTH
from tests.gloo.models import (
    adamw,
    apart,
    built,
    check_state,
    data,
    error_of,
    grouped,
    ranks_of,
    stateful,
    steps,
    trained_alone,
    trained_part,
)
from tests.gloo.world import World, on_ranks
from zeropp.train.parallel_model import ParallelModel

TOPOLOGIES: list[dict[str, Any]] = [
    {"pp": 2, "shard": 2, "chunks": 2},
    {"shard": 3},
    {"pp": 2, "replicate": 2, "replicate_zero": 1},
    {},
]


def alone(count: int) -> dict[str, Any]:
    """The state of the layers after some steps in one process."""
    optimizer = partial(torch.optim.AdamW, lr=1e-2)
    return trained_alone(stateful(), map(data, range(count)), optimizer).state_dict()


def parallel(**degrees: Any) -> ParallelModel:
    return built(stateful(), optimizer=adamw, **degrees)


def go_on(degrees: dict[str, Any], start: Path | None, target: Path, count: int) -> dict[str, Any]:
    """Load through torch, train, save through torch; gives the state dict on rank 0."""
    with parallel(**degrees) as model:
        assert isinstance(model, Stateful)
        first = 0
        if start is not None:
            counter = {"steps": torch.zeros((), dtype=torch.long)}
            load({"model": model, "loop": counter}, checkpoint_id=str(start))
            first = int(counter["steps"])
            assert model.engine.steps_done == first
        steps(model, *range(first, first + count))
        counter = {"steps": torch.tensor(first + count)}
        save({"model": model, "loop": counter}, checkpoint_id=str(target))
        return model.full_state_dict()


def test_training_goes_on_in_other_topologies_and_one_process_reads_it(
    world: World, tmp_path: Path
) -> None:
    start = None
    for number, degrees in enumerate(TOPOLOGIES):
        target = tmp_path / str(number)
        whole, *others = world.run(go_on, degrees, start, target, 2, size=ranks_of(degrees))
        assert not any(others)
        expected = trained_part(alone(2 * (number + 1)))
        check_state(trained_part(whole), expected, 1e-6)  # parameters come as fp32
        read = {"model": nn.ModuleList(stateful()).state_dict()}
        load(read, checkpoint_id=str(target), no_dist=True)
        check_state(trained_part(read["model"]), expected, 1e-12)
        start = target


@on_ranks(4)
def test_an_asynchronous_save_has_the_state_of_its_beginning(tmp_path: Path) -> None:
    with parallel(pp=2, shard=2) as model, parallel(shard=4) as other:
        steps(model, 0, 1)
        before = model.full_state_dict()
        saving: Any = async_save({"model": model}, checkpoint_id=str(tmp_path / "saved"))
        steps(model, 2, 3)
        saving.result()
        load({"model": other}, checkpoint_id=str(tmp_path / "saved"))
        found = other.full_state_dict()
        assert bool(before) == bool(found) == (dist.get_rank() == 0)
        if before:
            check_state(trained_part(found), trained_part(before), 0.0)


@on_ranks(4)
def test_whole_tensors_load_by_name() -> None:
    trained = alone(3)
    with parallel(pp=2, shard=2) as model:
        model.load_state_dict(trained)
        found = model.full_state_dict()
        if dist.get_rank() == 0:
            check_state(found, trained, 1e-6)
        missing = {name: value for name, value in trained.items() if name != "4.bias"}
        for given, words in (
            (missing, "4.bias: is missing"),
            ({**trained, "5.weight": torch.zeros(1)}, "5.weight: the model has nothing of that"),
            (
                {**trained, "0.weight": torch.zeros(WIDTH, WIDTH + 1)},
                "0.weight: has shape (8, 9), the model",
            ),
            ({**trained, "1.seen": torch.zeros(1)}, "1.seen: has shape (1,), the model ()"),
        ):
            others = {name: value + 1 if value.dim() else value for name, value in given.items()}
            said = error_of(partial(model.load_state_dict, {**others, "steps_done": 99}))
            assert said.startswith(f"ValueError: load_state_dict: {words}"), said
        after = model.full_state_dict()
        assert all(torch.equal(after[name], value) for name, value in found.items())
        assert model.engine.steps_done == 0


@on_ranks(2)
def test_a_model_with_other_groups_keeps_its_own_settings(tmp_path: Path) -> None:
    with grouped({"pp": 2}) as model:
        steps(model, 0, 1)
        model.save(tmp_path / "checkpoint")
        before = model.full_state_dict()
    rate = lambda groups: torch.optim.AdamW(groups["all"], lr=0.5)  # noqa: E731
    with built(stateful(), shard=2, optimizer=rate) as model:
        model.load(tmp_path / "checkpoint")
        after = model.full_state_dict()
        assert [group["lr"] for group in model.optimizer.param_groups] == [0.5]
        assert {float(kept["step"]) for kept in model.optimizer.state.values()} == {2.0}
    assert set(after) == set(before)
    assert all(torch.equal(before[name], after[name]) for name in before)


def anneal(
    degrees: dict[str, Any], start: dict[str, Any] | None, place: Path, first: int, last: int
) -> tuple[list[list[float]], dict[str, Any], dict[str, Tensor]]:
    """Train some steps with a scheduler, from a checkpoint on and into one. ``save`` writes those
    after an even number of steps and reads the others, torch writes and reads the rest."""
    with grouped(degrees) as model:
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(model.optimizer, T_max=8)
        if start is not None:
            if first % 2:
                model.load(place / str(first))
            else:
                load({"model": model}, checkpoint_id=str(place / str(first)))
            scheduler.load_state_dict(start)
        rates = []
        for step in range(first, last):
            steps(model, step)
            scheduler.step()
            rates.append([group["lr"] for group in model.optimizer.param_groups])
        if last % 2:
            save({"model": model}, checkpoint_id=str(place / str(last)))
        else:
            model.save(place / str(last))
        return rates, scheduler.state_dict(), model.full_state_dict()


def test_a_scheduler_goes_on_and_both_kinds_of_checkpoint_are_one(
    world: World, tmp_path: Path
) -> None:
    ((expected, _, whole),) = world.run(anneal, {}, None, tmp_path, 0, 6, size=1)
    stretches: list[tuple[dict[str, Any], int, int]] = [
        ({"pp": 2}, 0, 2), ({"shard": 2}, 2, 5), ({"pp": 2, "chunks": 2}, 5, 6)
    ]  # fmt: skip
    scheduler = None
    for degrees, first, last in stretches:
        results = world.run(anneal, degrees, scheduler, tmp_path, first, last, size=2)
        for rates, _, _ in results:
            assert len(rates) == last - first
            for found, rate in zip(rates, expected[first:last], strict=True):
                assert found == pytest.approx(rate, rel=1e-12)
        _, scheduler, state = results[0]
    check_state(trained_part(state), trained_part(whole), 1e-6)


@pytest.mark.parametrize("kind", [torch.optim.NAdam, torch.optim.Rprop])
@on_ranks(2)
def test_a_checkpoint_before_the_first_step_leaves_the_optimizer_unbegun(
    kind: Any, tmp_path: Path
) -> None:
    """Parameters after two steps: without a checkpoint, after saving one before the first step, in
    a new model that has read that, and in one that took over trained weights' step, but no state of
    the optimizer."""
    found = []
    for how in ("no checkpoint", "save", "load", "weights"):
        with grouped({"pp": 2}, kind) as model:
            if how == "save":
                model.save(tmp_path / "checkpoint")
            elif how == "load":
                model.load(tmp_path / "checkpoint")
            elif how == "weights":
                weights = nn.ModuleList(stateful()).state_dict()
                model.load_state_dict({**weights, "steps_done": torch.tensor(7)})
                assert model.engine.steps_done == 7
            steps(model, 0, 1)
            found.append(model.full_state_dict())  # empty on rank 1
    for other in found[1:] if dist.get_rank() == 0 else ():
        check_state(trained_part(other), trained_part(found[0]), 0.0)


@on_ranks(2)
def test_frozen_parameters_and_buffers_are_saved_and_loaded(tmp_path: Path) -> None:
    """By the engine's own files, after changes."""
    with parallel(pp=2, chunks=2) as model:
        steps(model, 0)
        model.save(tmp_path / "checkpoint")
        before = model.full_state_dict()
        with torch.no_grad():
            for flat in model.engine.flats:
                flat.master.zero_()
            for buffer in model.engine.buffers().values():
                buffer.fill_(99)
        model.load(tmp_path / "checkpoint")
        after = model.full_state_dict()
    assert list(before) == list(after)
    if dist.get_rank() == 0:
        assert float(before["3.seen"]) == ROWS
        assert len(before) == len(stateful()) * 2 + 2
        assert apart(after, before) == 0.0


@on_ranks(2)
def test_weights_alone_are_loaded(tmp_path: Path) -> None:
    place, plain = tmp_path / "checkpoint", tmp_path / "plain"
    if dist.get_rank() == 0:
        state = nn.ModuleList(stateful()).state_dict()
        save({"model": state}, checkpoint_id=str(plain), no_dist=True)
    with grouped({"pp": 2}) as model:
        start = dict(model.full_parameters())
        steps(model, 0, 1)
        model.save(place)
        before = dict(model.full_parameters())
    with grouped({"pp": 2, "chunks": 2}) as model:
        model.load(place, weights_only=True)
        after = {name: one for name, one in model.full_parameters() if name in before}
        assert apart(after, before) == 0.0
        assert model.engine.steps_done == len(model.optimizer.state) == 0
        model.load(plain, weights_only=True)
        again = dict(model.full_parameters())
        assert all(torch.equal(again[name], start[name]) for name in after)
