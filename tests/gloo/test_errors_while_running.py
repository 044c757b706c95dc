"""What one rank alone raises in the middle of a step, an evaluation, a save or a load: every rank
raises soon, and says what the first one said."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeropp
from tests.gloo.failing_layers import FailingLayer
from tests.gloo.world import World
from zeropp.engine import flat
from zeropp.engine.errors import Meeting
from zeropp.engine.lanes import Lane, make_lane
from zeropp.layout import InfeasibleError
from zeropp.parallel_model import ParallelModel

RANK = 1  # the one that fails
WIDTH, ROWS = 6, 12
DEGREES: list[dict[str, Any]] = [
    {"pp": 3},
    {"shard": 3},
    {"replicate": 3, "replicate_zero": 1},
    {"pp": 2, "shard": 2, "chunks": 2},
]


def fails(*_: Any, **__: Any) -> Any:
    """Raise on one rank."""
    if dist.get_rank() == RANK:
        raise ValueError("broken here\nand more")


def schedule(steps_done: int) -> float:
    """A factor on the learning rate."""
    del steps_done
    fails()
    return 1.0


class Optimizer(torch.optim.SGD):
    """Fails in one of the model's updates, on one rank."""

    def __init__(self, parameters: Any, lr: float, works: int) -> None:
        super().__init__(parameters, lr=lr)
        self.works = works  # updates that succeed

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Raise on one rank; a tensor of a few numbers belongs to a trial and not to the model."""
        if self.param_groups[0]["params"][0].numel() > 8:
            self.works -= 1
            if self.works < 0:
                fails()
        super().step()


def built(where: str, degrees: dict[str, Any]) -> ParallelModel:
    torch.manual_seed(3)
    works = {"first update": 0, "second update": 1}.get(where, 1000)
    more: dict[str, Any] = {"lr_schedule": schedule} if where == "schedule" else {}
    return zeropp.parallelize(
        [FailingLayer(nn.Linear(WIDTH, WIDTH), where, fails).double() for _ in range(6)],
        nn.functional.mse_loss,
        sample=torch.zeros(1, WIDTH, dtype=torch.float64),
        global_batch=ROWS,
        optimizer=lambda groups: Optimizer(groups["all"], 0.1, works),
        **degrees,
        **more,
    )


def error_of(call: Callable[[], object]) -> str:
    """What a call raises; empty for nothing. A rank that waited for another one would do so for
    gloo's 30 minutes, and the world would be cut off."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


CASES = ("forward", "backward", "schedule", "first update", "second update", "evaluation")


def failed_steps(degrees: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """What a step, and the one after it, say in every case."""
    found = {}
    batch = torch.randn(2, ROWS, WIDTH, dtype=torch.float64)
    for where in CASES:
        with built(where, degrees) as model:
            inputs, targets = batch[:, model.rows]
            if where == "second update":
                model.train_step(inputs, targets)
            call = model.eval_step if where == "evaluation" else model.train_step
            first = error_of(lambda call=call, i=inputs, t=targets: call(i, t))  # type: ignore[misc]
            again = error_of(lambda m=model, i=inputs, t=targets: m.train_step(i, t))  # type: ignore[misc]
            found[where] = first, again
    return found


@pytest.mark.parametrize("degrees", DEGREES, ids=str)
def test_an_error_in_the_middle_reaches_every_rank(world: World, degrees: dict[str, Any]) -> None:
    size = degrees.get("pp", 1) * degrees.get("shard", 1) * degrees.get("replicate", 1)
    for rank, found in enumerate(world.run(failed_steps, degrees, size=size)):
        assert set(found) == set(CASES)
        for where, (first, again) in found.items():
            expected = "PeerError: rank 1 raised ValueError: broken here"
            if rank == RANK:
                expected = "ValueError: broken here\nand more"
            assert first == expected, where
            assert again.startswith("RuntimeError: an earlier step raised"), where


def save_after_a_failure(place: Path) -> list[float]:
    """Save after a step that failed, and load that: how far the first rank's copies of all
    parameters have moved."""
    with built("forward", {"pp": 3}) as model:
        before = model.full_state_dict()
        batch = torch.randn(2, ROWS, WIDTH, dtype=torch.float64)
        assert error_of(lambda: model.train_step(*batch))
        assert "ended the connections" in error_of(model.full_state_dict)
        model.save(place)
    with built("", {"shard": 3}) as model:
        model.load(place)
        after = model.full_state_dict()
    return [float((after[n] - before[n]).abs().max()) for n in before]


def test_a_checkpoint_after_an_error_has_the_values_before_the_step(
    world: World, tmp_path: Path
) -> None:
    first, *others = world.run(save_after_a_failure, tmp_path / "checkpoint", size=3)
    assert first
    assert first == [0.0] * len(first)
    assert others == [[], []]


def keep_after_an_update_that_failed(place: Path) -> list[str]:
    """What saves and gathers say after an optimizer's error on one rank."""
    with built("second update", {"replicate": 3, "replicate_zero": 1}) as model:
        batch = torch.randn(2, ROWS, WIDTH, dtype=torch.float64)[:, model.rows]
        model.train_step(*batch)
        assert model.state_dict()
        assert "broken here" in error_of(lambda: model.train_step(*batch))
        calls = (lambda: model.save(place), model.state_dict, model.full_state_dict)
        return [error_of(call) for call in calls]


def test_a_model_that_only_some_ranks_have_updated_is_not_saved(
    world: World, tmp_path: Path
) -> None:
    expected = "RuntimeError: an optimizer's error left some ranks updated and others not"
    for found in world.run(keep_after_an_update_that_failed, tmp_path / "checkpoint", size=3):
        assert len(found) == 3
        assert all(said.startswith(expected) for said in found), found
    assert not (tmp_path / "checkpoint").exists()


def failed_updates() -> list[list[str]]:
    """What two updates raise of which rank 1 fails in the second: where ranks can give up, and
    where they cannot."""
    found = []
    for give_up in (lambda: None, None):
        meeting = Meeting(torch.device("cpu"), give_up=give_up)
        found.append([error_of(lambda m=meeting, w=w: m.update(w)) for w in (int, fails)])  # type: ignore[misc]
    return found


def test_ranks_that_cannot_give_up_share_the_first_update_only(world: World) -> None:
    own, peers = "ValueError: broken here\nand more", "PeerError: rank 1 raised ValueError: broken"
    for rank, found in enumerate(world.run(failed_updates, size=2)):
        assert [first for first, _ in found] == ["", ""]
        assert found[0][1].startswith(own if rank == RANK else peers)
        assert found[1][1] == (own if rank == RANK else "")


def failed_calls(place: Path) -> dict[str, str]:
    """What saves, loads and gathers say that one rank calls wrongly, or in which it fails."""
    mine, found = dist.get_rank() == RANK, {}
    with built("", {"pp": 3}) as model:
        model.save(place)
        nowhere: Any = None if mine else place
        found["save to None"] = error_of(lambda: model.save(nowhere))
        other = place.with_name("other") if mine else place
        found["save elsewhere"] = error_of(lambda: model.save(other))
        found["load from None"] = error_of(lambda: model.load(nowhere))
        given: Any = None if mine else {}
        found["no state dict"] = error_of(lambda: model.load_state_dict(given))
        model.load(place)
        copies = flat.FlatParameters.copies
        with mock.patch.object(flat.FlatParameters, "copies", fails if mine else copies):
            found["full_state_dict"] = error_of(model.full_state_dict)
    return found


CALLS = {
    "save to None": "TypeError: ",
    "save elsewhere": "CheckpointError: ",
    "load from None": "TypeError: ",
    "no state dict": "AttributeError: ",
    "full_state_dict": "ValueError: broken here",
}


def test_saves_and_loads_that_one_rank_calls_wrongly(world: World, tmp_path: Path) -> None:
    for rank, found in enumerate(world.run(failed_calls, tmp_path / "checkpoint", size=3)):
        assert set(found) == set(CALLS)
        for name, own in CALLS.items():
            expected = own if rank == RANK else f"PeerError: rank 1 raised {own}"
            assert found[name].startswith(expected), (name, found[name])


def failed_constructions() -> dict[str, str]:
    """What ``parallelize`` says where one rank fails at something that it does on its own."""
    mine, found = dist.get_rank() == RANK, {}
    device: Any = "cuda" if mine else None
    found["device"] = error_of(lambda: built("", {"pp": 3, "device": device}))
    found["no backend"] = error_of(lambda: built("", {"pp": 3, "device": "meta"}))
    threads = set(threading.enumerate())
    for name, where, wrong in (
        ("values", "zeropp.api.described", fails),
        ("lanes", "zeropp.engine.lanes.make_lane", second_lane_fails),
    ):
        with mock.patch(where, wrong) if mine else nullcontext():
            found[name] = error_of(lambda: built("", {"pp": 3}))
    new = set(threading.enumerate()) - threads
    found["threads left"] = " ".join(one.name for one in new if one.name.startswith("zeropp"))
    return found


def second_lane_fails(device: torch.device, name: str) -> Lane:
    """Make the first of a rank's lanes, and raise for the second one."""
    if name == "zeropp reductions":
        fails()
    return make_lane(device, name)


def test_constructions_that_fail_on_one_rank(world: World) -> None:
    for rank, found in enumerate(world.run(failed_constructions, size=3)):
        own = "" if rank == RANK else "PeerError: rank 1 raised "
        # torch without CUDA; torch with it, in a process that was forked
        no_cuda = ("AssertionError: Torch not compiled", "RuntimeError: Cannot re-initialize CUDA")
        assert found["device"].startswith(own)
        assert found["device"].removeprefix(own).startswith(no_cuda), found
        refused = f"{InfeasibleError.__name__}: device='meta': the process group has no backend"
        assert found["no backend"].startswith(refused)
        for name in ("values", "lanes"):
            assert found[name].startswith(f"{own}ValueError: broken here"), name
        assert found["threads left"] == ""
