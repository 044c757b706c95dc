"""The model as a ``Stateful`` of torch.distributed.checkpoint: what it saves, who can read it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.checkpoint.stateful import Stateful

import zeropp
from tests.gloo.small_layers import BATCH, loss_function
from tests.gloo.stateful_cases import (
    WIDTH,
    Kind,
    alone,
    check,
    data,
    grouped,
    made,
    parallel,
    train,
    trained_part,
)
from tests.gloo.world import World

TOPOLOGIES: list[dict[str, Any]] = [
    {"pp": 2, "shard": 2, "chunks": 2},
    {"shard": 3},
    {"pp": 2, "replicate": 2, "replicate_zero": 1},
    {},
]


def go_on(degrees: dict[str, Any], start: Path | None, target: Path, steps: int) -> dict[str, Any]:
    """Load through torch, train, save through torch; gives the state dict on rank 0."""
    with parallel(degrees) as model:
        assert isinstance(model, Stateful)
        first = 0
        if start is not None:
            counter = {"steps": torch.zeros((), dtype=torch.long)}
            load({"model": model, "loop": counter}, checkpoint_id=str(start))
            first = int(counter["steps"])
            assert model.engine.steps_done == first
        train(model, first, first + steps)
        counter = {"steps": torch.tensor(first + steps)}
        save({"model": model, "loop": counter}, checkpoint_id=str(target))
        return model.full_state_dict()


def test_training_goes_on_in_other_topologies_and_one_process_reads_it(
    world: World, tmp_path: Path
) -> None:
    start = None
    for number, degrees in enumerate(TOPOLOGIES):
        target = tmp_path / str(number)
        size = degrees.get("pp", 1) * degrees.get("shard", 1) * degrees.get("replicate", 1)
        whole, *others = world.run(go_on, degrees, start, target, 2, size=size)
        assert not any(others)
        expected = alone(2 * (number + 1)).state_dict()
        check(trained_part(whole), trained_part(expected), 1e-6)  # parameters come as fp32
        read = {"model": nn.ModuleList(made()).state_dict()}
        load(read, checkpoint_id=str(target), no_dist=True)
        check(trained_part(read["model"]), trained_part(expected), 1e-12)
        start = target


def train_on_while_saving(place: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The whole state when an asynchronous save began, and what a new model reads of it."""
    with parallel({"pp": 2, "shard": 2}) as model, parallel({"shard": 4}) as other:
        train(model, 0, 2)
        before = model.full_state_dict()
        saving: Any = async_save({"model": model}, checkpoint_id=str(place))
        train(model, 2, 4)
        saving.result()
        load({"model": other}, checkpoint_id=str(place))
        return trained_part(before) if before else {}, other.full_state_dict()


def test_an_asynchronous_save_has_the_state_of_its_beginning(world: World, tmp_path: Path) -> None:
    (before, found), *_ = world.run(train_on_while_saving, tmp_path / "saved", size=4)
    check(trained_part(found), before, 0.0)


def load_whole() -> dict[str, str]:
    """Load whole tensors by the model's names; what wrong ones say."""
    trained = alone(3).state_dict()
    with parallel({"pp": 2, "shard": 2}) as model:
        model.load_state_dict(trained)
        found = model.full_state_dict()
        if dist.get_rank() == 0:
            check(found, trained, 1e-6)
        wrong = {
            "missing": {name: value for name, value in trained.items() if name != "4.bias"},
            "unknown": {**trained, "5.weight": torch.zeros(1)},
            "other shape": {**trained, "0.weight": torch.zeros(WIDTH, WIDTH + 1)},
            "buffer": {**trained, "1.seen": torch.zeros(1)},
        }
        said = {}
        for kind, given in wrong.items():
            others = {name: value + 1 if value.dim() else value for name, value in given.items()}
            try:
                model.load_state_dict({**others, "steps_done": 99})
            except ValueError as error:
                said[kind] = str(error)
        after = model.full_state_dict()
        assert all(torch.equal(after[name], value) for name, value in found.items())
        assert model.engine.steps_done == 0
        return said


def test_whole_tensors_load_by_name(world: World) -> None:
    first, *others = world.run(load_whole, size=4)
    assert others == [first] * 3
    assert first["missing"].startswith("load_state_dict: 4.bias: is missing")
    assert first["unknown"].startswith("load_state_dict: 5.weight: the model has nothing of that")
    assert first["other shape"].startswith("load_state_dict: 0.weight: has shape (6, 7), the model")
    assert first["buffer"].startswith("load_state_dict: 1.seen: has shape (1,), the model ()")


def regrouped(place: Path) -> tuple[bool, list[float], set[float]]:
    """A checkpoint of two optimizer groups, read by a model with one: whether the parameters are
    the same, the learning rate that is then there, and the steps that the optimizer has counted."""
    with grouped({"pp": 2}) as model:
        train(model, 0, 2)
        model.save(place)
        before = model.full_state_dict()
    with zeropp.parallelize(
        made(), loss_function, sample=data(0)[0][:1], global_batch=BATCH, shard=2,
        optimizer=lambda groups: torch.optim.AdamW(groups["all"], lr=0.5),
    ) as model:  # fmt: skip
        model.load(place)
        after = model.full_state_dict()
        counted = {float(kept["step"]) for kept in model.optimizer.state.values()}
        rates = [group["lr"] for group in model.optimizer.param_groups]
    same = [torch.equal(before[name], after[name]) for name in before]
    return all(same) and set(after) == set(before), rates, counted


def test_a_model_with_other_groups_keeps_its_own_settings(world: World, tmp_path: Path) -> None:
    for same, rates, counted in world.run(regrouped, tmp_path / "checkpoint", size=2):
        assert same
        assert rates == [0.5]
        assert counted == {2.0}


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
            train(model, step, step + 1)
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
    check(trained_part(state), trained_part(whole), 1e-6)


def save_first(place: Path, kind: Kind) -> list[dict[str, Tensor]]:
    """Parameters after two steps: without a checkpoint, after saving one before the first step, in
    a new model that has read that, and in one that took over trained weights' step, but no state of
    the optimizer."""
    found = []
    for how in ("no checkpoint", "save", "load", "weights"):
        with grouped({"pp": 2}, kind) as model:
            if how == "save":
                model.save(place)
            elif how == "load":
                model.load(place)
            elif how == "weights":
                weights = nn.ModuleList(made()).state_dict()
                model.load_state_dict({**weights, "steps_done": torch.tensor(7)})
                assert model.engine.steps_done == 7
            train(model, 0, 2)
            found.append(model.full_state_dict())  # empty on rank 1
    return found


@pytest.mark.parametrize("kind", [torch.optim.NAdam, torch.optim.Rprop])
def test_a_checkpoint_before_the_first_step_leaves_the_optimizer_unbegun(
    world: World, tmp_path: Path, kind: Kind
) -> None:
    first, *others = world.run(save_first, tmp_path / "checkpoint", kind, size=2)[0]
    assert first
    assert len(others) == 3
    for found in others:
        check(trained_part(found), trained_part(first), 0.0)


def save_and_load(directory: Path) -> list[float]:
    """Counters and frozen values after a save, changes, and a load; by the engine's own files."""
    with parallel({"pp": 2, "chunks": 2}) as model:
        train(model, 0, 1)
        model.save(directory)
        before = model.full_state_dict()
        assert not before or float(before["3.seen"]) == BATCH
        with torch.no_grad():
            for flat in model.engine.flats:
                flat.master.zero_()
            for buffer in model.engine.buffers().values():
                buffer.fill_(99)
        model.load(directory)
        after = model.full_state_dict()
    assert list(before) == list(after)
    return [float((before[name] - after[name]).abs().max()) for name in before]


def test_frozen_parameters_and_buffers_are_saved_and_loaded(world: World, tmp_path: Path) -> None:
    first, second = world.run(save_and_load, tmp_path / "checkpoint", size=2)
    assert len(first) == len(made()) * 2 + 2
    assert first == [0.0] * len(first)
    assert second == []


def load_weights(place: Path, plain: Path) -> tuple[float, int, int, bool]:
    """How far the weights alone of a checkpoint are from those that were saved; the steps that are
    then done, the tensors of which the optimizer has state, and whether the weights of a plain
    model are then those at the start."""
    with grouped({"pp": 2}) as model:
        start = dict(model.full_parameters())
        train(model, 0, 2)
        model.save(place)
        before = dict(model.full_parameters())
    with grouped({"pp": 2, "chunks": 2}) as model:
        model.load(place, weights_only=True)
        after = dict(model.full_parameters())
        known = [name for name in after if name in before]
        apart = [float((after[name] - before[name]).abs().max()) for name in known]
        model.load(plain, weights_only=True)
        again = dict(model.full_parameters())
        same = all(torch.equal(again[name], start[name]) for name in known)
        return max(apart), model.engine.steps_done, len(model.optimizer.state), same


def test_weights_alone_are_loaded(world: World, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    save({"model": nn.ModuleList(made()).state_dict()}, checkpoint_id=str(plain), no_dist=True)
    found = world.run(load_weights, tmp_path / "checkpoint", plain, size=2)
    assert found == [(0.0, 0, 0, True)] * 2
