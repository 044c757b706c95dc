"""What one rank alone gets wrong: every rank raises, and none waits for the others. One that did
would do so for gloo's 30 minutes, and the world would be cut off."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeropp
from tests.gloo.engine_cases import ADAMW, Case, build_model_of, local_microbatches
from tests.gloo.small_layers import BATCH, WIDTH, built, data, error_of, linear, seeded, step
from tests.gloo.world import World
from zeropp.engine import checkpoint, flat
from zeropp.engine.checkpoint import CheckpointError
from zeropp.engine.errors import PeerError, together
from zeropp.engine.lanes import Lane, make_lane
from zeropp.train.parallel_model import ParallelModel
from zeropp.types.layout import InfeasibleError

RANK = 1  # the one that fails


def fail(error: Exception) -> Callable[..., Any]:
    """A function that raises on one rank, and does nothing on the others."""

    def run(*_: Any, **__: Any) -> None:
        if dist.get_rank() == RANK:
            raise error

    return run


def told(error: Exception) -> tuple[str, str]:
    """Kind and text of what ``together`` raises on this rank."""
    try:
        together(lambda: fail(error)())
    except Exception as raised:
        return type(raised).__name__, str(raised)
    return "", ""


def test_every_rank_raises(world: World) -> None:
    said = world.run(told, torch.OutOfMemoryError("tried 2 GiB\nof 1"), size=3)
    peers = ("PeerError", "rank 1 raised OutOfMemoryError: tried 2 GiB")
    assert said == [peers, ("OutOfMemoryError", "tried 2 GiB\nof 1"), peers]
    said = world.run(told, InfeasibleError("pp=3: no"), size=3)
    assert said == [("InfeasibleError", "pp=3: no (on rank 1)")] * 3


class Broken(nn.Linear):
    """A layer that can be made on the meta device alone."""

    def __init__(self) -> None:
        if torch.get_default_device().type != "meta" and dist.get_rank() == RANK:
            raise MemoryError("no room")
        super().__init__(WIDTH, WIDTH)


def failed_building(what: str) -> str:
    """What ``parallelize`` says on this rank where rank 1 alone fails while it does something."""
    layers: list[Any] = seeded([linear] * 4)
    more: dict[str, Any] = {"pp": 2}
    out_of_memory = fail(torch.OutOfMemoryError("tried 2 GiB"))
    patch: Any = mock.patch.object(flat, "zeros", flat.zeros)
    if what == "sample":
        more["sample"] = data()[0][:1] if dist.get_rank() != RANK else "rows"
    elif what == "layer":
        layers = [lambda: Broken().double()] * 4
    elif what == "buffers":
        original = flat.FlatParameters.__init__

        def init(*arguments: Any, **keywords: Any) -> None:
            out_of_memory()
            original(*arguments, **keywords)

        patch = mock.patch.object(flat.FlatParameters, "__init__", init)
    elif what == "optimizer":

        def optimizer(groups: Any) -> torch.optim.Optimizer:
            return torch.optim.SGD(groups["all"], lr=0.1 - dist.get_rank())

        more["optimizer"] = optimizer
    elif what == "keyword" and dist.get_rank() == RANK:
        more["tp"] = 2
    with patch:
        return error_of(lambda: built(layers, **more))


@pytest.mark.parametrize(
    ("what", "own", "peers"),
    [
        ("sample", "InfeasibleError: sample='rows'", "InfeasibleError: sample='rows': must be"),
        ("layer", "MemoryError: no room", "PeerError: rank 1 raised MemoryError: no room"),
        ("buffers", "OutOfMemoryError: tried", "PeerError: rank 1 raised OutOfMemoryError: tried"),
        ("optimizer", "InfeasibleError: optimizer: cannot", "InfeasibleError: optimizer: cannot"),
        ("keyword", "TypeError: parallel", "PeerError: rank 1 raised TypeError: parallelize: got"),
    ],
)
def test_a_failure_while_building(world: World, what: str, own: str, peers: str) -> None:
    first, second = world.run(failed_building, what, size=2)
    assert second.startswith(own), second
    assert first.startswith(peers), first
    assert "\n" not in first


WRONG_STEPS = {
    "rows": "ValueError: inputs: 5 rows, but this rank trains on 12 rows per step",
    "keyword": "TypeError: keyword inputs are ['mask']",
    "no_grad": "RuntimeError: train_step: gradients are disabled",
    "no tensor": "TypeError: targets: must be a dense tensor with this rank's rows in dimension 0",
    "device": "ValueError: targets: is on meta, but this rank trains on cpu",
    "evaluation": "ValueError: inputs: numbers of rows differ",
}


def wrong_step(model: ParallelModel, what: str) -> str:
    """What a call raises that is right on every rank but one, where it is wrong in this way."""
    inputs, targets = data()
    call = model.eval_step if what == "evaluation" else model.train_step
    if dist.get_rank() != RANK:
        return error_of(partial(call, inputs, targets))
    part = inputs[:5] if what in ("rows", "evaluation") else inputs
    given: Any = {"no tensor": None, "device": targets.to("meta")}.get(what, targets)
    more = {"mask": inputs} if what == "keyword" else {}
    with torch.set_grad_enabled(what != "no_grad"):
        return error_of(partial(call, part, given, **more))


def failed_steps() -> tuple[dict[str, str], list[list[float]]]:
    """What steps raise that rank 1 alone calls in a wrong way, one after another; and the losses of
    this model in right steps between them, and of one that was never called so."""
    said: dict[str, str] = {}
    losses: list[list[float]] = []
    for wrong in (WRONG_STEPS, {}):
        with built(seeded([linear] * 4), pp=2) as model:
            losses.append([])
            for what in wrong:
                said[what] = wrong_step(model, what)
                if what == "keyword":
                    losses[-1].append(step(model))
            losses[-1] += [step(model) for _ in range(3 - len(losses[-1]))]
    return said, losses


def test_steps_that_one_rank_calls_in_a_wrong_way(world: World) -> None:
    for rank, (said, (found, expected)) in enumerate(world.run(failed_steps, size=2)):
        assert found == expected
        assert len(set(found)) == 3
        assert set(said) == set(WRONG_STEPS)
        for what, own in WRONG_STEPS.items():
            words = own if rank == RANK else f"PeerError: rank 1 raised {own}"
            assert said[what].startswith(words), (what, said[what])


class Masked(nn.Module):
    """A linear layer that takes a keyword input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y * mask


def masked_step(device: list[str], in_loss: bool) -> str:
    """What a step says in which each rank has the mask on a device of its own; the first layer
    takes the mask, or the loss function does."""
    mask = torch.ones(BATCH, 1, dtype=torch.float64)
    with zeropp.parallelize(
        seeded([linear if in_loss else Masked, linear]),
        masked_loss if in_loss else nn.functional.mse_loss,
        sample=data()[0][:1],
        global_batch=BATCH,
        sample_keywords={"mask": mask[:1]},
        pp=2,
    ) as model:
        mine = mask.to(device[dist.get_rank()])
        return error_of(lambda: model.train_step(*data(), mask=mine))


def masked_loss(output: Tensor, target: Tensor, mask: Tensor) -> Tensor:
    """A loss function that takes the keyword input."""
    return nn.functional.mse_loss(output * mask, target)


@pytest.mark.parametrize("in_loss", [False, True])
def test_a_keyword_input_on_another_device_where_it_is_used(world: World, in_loss: bool) -> None:
    user, other = (1, 0) if in_loss else (0, 1)
    devices = {rank: ["meta" if one == rank else "cpu" for one in range(2)] for rank in range(2)}
    said = world.run(masked_step, devices[user], in_loss, size=2)
    wrong = "ValueError: mask: is on meta, but this rank trains on cpu"
    assert said[user].startswith(wrong)
    assert said[other].startswith(f"PeerError: rank {user} raised {wrong}")
    assert world.run(masked_step, devices[other], in_loss, size=2) == ["", ""]


def failed_evaluation() -> str:
    """What a step says after an evaluation in which the loss function raised."""
    model = zeropp.parallelize(
        seeded([linear] * 2), fail_in_evaluation, sample=data()[0][:1], global_batch=BATCH
    )
    assert error_of(lambda: model.eval_step(*data())).startswith("ValueError: no loss")
    assert error_of(model.state_dict) == error_of(model.full_state_dict)
    return error_of(lambda: model.train_step(*data()))


def fail_in_evaluation(output: Tensor, target: Tensor) -> Tensor:
    """A loss function for training alone."""
    if not torch.is_grad_enabled():
        raise ValueError("no loss")
    return nn.functional.mse_loss(output, target)


def test_a_step_after_an_evaluation_that_raised(world: World) -> None:
    (said,) = world.run(failed_evaluation, size=1)
    assert said.startswith("RuntimeError: an earlier step raised ValueError: no loss")


def after_a_failed_update() -> list[str]:
    """What a rank says to calls after a step whose update has raised on rank 1 alone."""
    with zeropp.parallelize(
        seeded([linear] * 2), nn.functional.mse_loss, sample=data()[0][:1], global_batch=BATCH, pp=2
    ) as model:
        if dist.get_rank() == 1:
            updater: Any = model.engine.updater
            updater.update = mock.Mock(side_effect=ZeroDivisionError("no"))
        failed = error_of(lambda: model.train_step(*data()))
        others = (lambda: model.save("nowhere"), model.state_dict, model.full_state_dict)
        return [failed, *map(error_of, others)]


def test_no_rank_waits_for_one_whose_update_failed(world: World) -> None:
    first, second = world.run(after_a_failed_update, size=2)
    assert second[0].startswith("ZeroDivisionError")
    assert all(said.startswith("PeerError: rank 1 raised RuntimeError: an e") for said in first[1:])
    assert all(said.startswith("RuntimeError: an earlier step raised") for said in second[1:])


SMALL = Case(pp=1, shard=2, chunks=1, layers=1, batch=4)
SAVING = {"making the directory": "_make_empty", "writing": "_digest", "renaming": "_publish"}


def saves_that_fail(place: Path) -> dict[str, str]:
    """Save, then save again while one rank fails in something, and again in something else; what
    each of these saves raises, and the steps that the checkpoint then has."""

    def broken(*_: Any) -> None:
        raise OSError("disk full")

    first, found = dist.get_rank() == 0, {}
    model = build_model_of(SMALL, torch.float32, ADAMW)
    model.save(place)
    for what, name in SAVING.items():
        model.engine.step(local_microbatches(SMALL, 0))
        original = getattr(checkpoint, name)
        with mock.patch.object(checkpoint, name, broken if first else original):
            said = error_of(lambda: model.save(place))
        model.load(place)
        found[what] = f"{said} | {model.steps_done}"
    return found


def test_saves_that_fail_on_one_rank(world: World, tmp_path: Path) -> None:
    first, second = world.run(saves_that_fail, tmp_path / "checkpoint", size=2)
    assert first == dict.fromkeys(SAVING, "OSError: disk full | 0")
    assert second == dict.fromkeys(SAVING, "PeerError: rank 0 raised OSError: disk full | 0")


def load_without_the_file(place: Path) -> tuple[str, bool]:
    """What a load of nothing raises; a directory that only some ranks see."""
    model = build_model_of(SMALL, torch.float32, ADAMW)
    model.save(place)
    found = place if dist.get_rank() == 0 else place / "elsewhere"
    try:
        model.load(found)
    except (CheckpointError, PeerError) as error:
        return type(error).__name__, "no checkpoint" in str(error)
    return "", False


def test_a_checkpoint_that_one_rank_does_not_see(world: World, tmp_path: Path) -> None:
    said = world.run(load_without_the_file, tmp_path / "checkpoint", size=2)
    assert said == [("PeerError", True), ("CheckpointError", True)]


def broken(*_: Any, **__: Any) -> Any:
    """Raise."""
    raise ValueError("broken here")


def failed_calls(place: Path) -> dict[str, str]:
    """What saves, loads and gathers say that one rank calls wrongly, or in which it fails."""
    mine, found = dist.get_rank() == RANK, {}
    with (
        built(seeded([linear] * 4), pp=3) as model,
        mock.patch.object(checkpoint, "_SEEN_S", 1.0),  # of an elsewhere that nobody makes
    ):
        model.save(place)
        nowhere: Any = None if mine else place
        found["save to None"] = error_of(lambda: model.save(nowhere))
        other = place.with_name("other") if mine else place
        found["save elsewhere"] = error_of(lambda: model.save(other))
        found["load from None"] = error_of(lambda: model.load(nowhere))
        given: Any = None if mine else {}
        found["no state dict"] = error_of(lambda: model.load_state_dict(given))
    return found


CALLS = {
    "save to None": "TypeError: ",
    "save elsewhere": "CheckpointError: ",
    "load from None": "TypeError: ",
    "no state dict": "TypeError: ",
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
    found["device"] = error_of(lambda: built(seeded([linear] * 4), pp=3, device=device))
    found["no backend"] = error_of(lambda: built(seeded([linear] * 4), pp=3, device="meta"))
    threads = set(threading.enumerate())
    for name, where, wrong in (
        ("buffers", "zeropp.engine.engine.make_flats", broken),
        ("lanes", "zeropp.engine.lanes.make_lane", second_lane_fails),
    ):
        with mock.patch(where, wrong) if mine else nullcontext():
            found[name] = error_of(lambda: built(seeded([linear] * 4), pp=3))
    new = set(threading.enumerate()) - threads
    found["threads left"] = " ".join(one.name for one in new if one.name.startswith("zeropp"))
    return found


def second_lane_fails(device: torch.device, name: str) -> Lane:
    """Make the first of a rank's lanes, and raise for the second one."""
    if name == "zeropp reductions":
        broken()
    return make_lane(device, name)


def test_constructions_that_fail_on_one_rank(world: World) -> None:
    for rank, found in enumerate(world.run(failed_constructions, size=3)):
        own = "" if rank == RANK else "PeerError: rank 1 raised "
        # without a GPU; with one, in a process that was forked
        no_cuda = (
            "InfeasibleError: device='cuda': this",
            "RuntimeError: Cannot re-initialize CUDA",
        )
        assert found["device"].removeprefix(own).startswith(no_cuda), found
        refused = f"{InfeasibleError.__name__}: device='meta': the process group has no backend"
        assert found["no backend"].startswith(refused)
        for name in ("buffers", "lanes"):
            assert found[name].startswith(f"{own}ValueError: broken here"), name
        assert found["threads left"] == ""
