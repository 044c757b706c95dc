"""What one rank alone gets wrong: every rank raises, and none waits for the others. One that did
would do so for gloo's 30 minutes, and the world would be cut off."""

from __future__ import annotations

import os
import threading
import time
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
from torch.distributed.checkpoint import state_dict_saver

from tests.gloo.cases import Case, build_model_of, local_microbatches
from tests.gloo.layers import ROWS, WIDTH, Masked, linear
from tests.gloo.models import built, data, error_of, loss_function, refuses, seeded, step, steps
from tests.gloo.world import WorkerError, World, on_ranks
from zeropp.engine import checkpoint
from zeropp.engine.checkpoint import CheckpointError
from zeropp.engine.parameters import flat
from zeropp.engine.ranks.errors import together
from zeropp.engine.ranks.lanes import Lane, make_lane
from zeropp.types.layout import InfeasibleError

RANK = 1  # the one that fails


def fail(error: Exception) -> Callable[..., Any]:
    """A function that raises on one rank, and does nothing on the others."""

    def run(*_: Any, **__: Any) -> None:
        if dist.get_rank() == RANK:
            raise error

    return run


def starts(said: str, own: str, rank: int = RANK) -> bool:
    """Whether this rank says what it must where that one fails with such words."""
    expected = own if dist.get_rank() == rank else f"PeerError: rank {rank} raised {own}"
    return said.startswith(expected)


@on_ranks(3)
def test_every_rank_raises() -> None:
    raised = fail(torch.OutOfMemoryError("tried 2 GiB\nof 1"))
    own, peers = "tried 2 GiB\nof 1", "PeerError: rank 1 raised OutOfMemoryError: tried 2 GiB"
    expected = f"OutOfMemoryError: {own}" if dist.get_rank() == RANK else peers
    assert error_of(lambda: together(raised)) == expected
    raised = fail(InfeasibleError("pp=3: no"))
    assert error_of(lambda: together(raised)) == "InfeasibleError: pp=3: no (on rank 1)"


class Broken(nn.Linear):
    """A layer that can be made on the meta device alone."""

    def __init__(self) -> None:
        if torch.get_default_device().type != "meta" and dist.get_rank() == RANK:
            raise MemoryError("no room")
        super().__init__(WIDTH, WIDTH)


@pytest.mark.parametrize(
    ("what", "own", "peers"),
    [
        ("sample", "InfeasibleError: sample='rows'", "InfeasibleError: sample='rows': must be"),
        ("layer", "MemoryError: no room", "PeerError: rank 1 raised MemoryError: no room"),
        ("buffers", "OutOfMemoryError: tried", "PeerError: rank 1 raised OutOfMemoryError: tried"),
        ("optimizer", "InfeasibleError: optimizer: cannot", "InfeasibleError: optimizer: cannot"),
        ("keyword", "TypeError: parallelize", "PeerError: rank 1 raised TypeError: parallelize"),
    ],
)
@on_ranks(2)
def test_a_failure_while_building(what: str, own: str, peers: str) -> None:
    mine, init = dist.get_rank() == RANK, flat.FlatParameters.__init__
    layers: list[Any] = seeded([linear] * 4)
    more: dict[str, Any] = {"pp": 2}
    if what == "sample" and mine:
        more["sample"] = "rows"
    elif what == "layer":
        layers = [lambda: Broken().double()] * 4
    elif what == "optimizer":
        rate = 0.1 - dist.get_rank()
        more["optimizer"] = lambda groups: torch.optim.SGD(groups["all"], lr=rate)
    elif what == "keyword" and mine:
        more["tp"] = 2
    out_of_memory = (
        fail(torch.OutOfMemoryError("tried 2 GiB")) if what == "buffers" else mock.Mock()
    )

    def init_or_fail(*arguments: Any, **keywords: Any) -> None:
        out_of_memory()
        init(*arguments, **keywords)

    with mock.patch.object(flat.FlatParameters, "__init__", init_or_fail):
        said = error_of(lambda: built(layers, **more))
    assert said.startswith(own if mine else peers), said
    assert mine or "\n" not in said


WRONG_STEPS = {
    "rows": "ValueError: inputs: 5 rows, but this rank trains on 12 rows per step",
    "keyword": "TypeError: keyword inputs are ['mask']",
    "no_grad": "RuntimeError: train_step: gradients are disabled",
    "no tensor": "TypeError: targets: must be a dense tensor with this rank's rows in dimension 0",
    "device": "ValueError: targets: is on meta, but this rank trains on cpu",
    "evaluation": "ValueError: inputs: numbers of rows differ",
}


@on_ranks(2)
def test_steps_that_one_rank_calls_in_a_wrong_way() -> None:
    """One after another; right steps between them are those of a model that was never called so."""
    inputs, targets = data()
    mine = dist.get_rank() == RANK
    losses = []
    with built(pp=2) as model:
        for what, own in WRONG_STEPS.items():
            call = model.eval_step if what == "evaluation" else model.train_step
            part = inputs[:5] if mine and what in ("rows", "evaluation") else inputs
            wrong: dict[str, Any] = {"no tensor": None, "device": targets.to("meta")}
            given = wrong.get(what, targets) if mine else targets
            more = {"mask": inputs} if mine and what == "keyword" else {}
            with torch.set_grad_enabled(not (mine and what == "no_grad")):
                said = error_of(partial(call, part, given, **more))
            assert starts(said, own), (what, said)
            if what == "keyword":
                losses.append(step(model))
        losses += steps(model, 0, 0)
    with built(pp=2) as model:
        assert losses == steps(model, 0, 0, 0)
    assert len(set(losses)) == 3


def masked_loss(output: Tensor, target: Tensor, mask: Tensor) -> Tensor:
    """A loss function that takes the keyword input."""
    return nn.functional.mse_loss(output * mask, target)


@pytest.mark.parametrize("in_loss", [False, True])
@on_ranks(2)
def test_a_keyword_input_on_another_device_of_one_rank(in_loss: bool) -> None:
    """The first layer takes the mask, or the loss function does."""
    mask = torch.ones(ROWS, 1, dtype=torch.bool)
    for rank in range(2):
        with built(
            seeded([linear if in_loss else Masked, linear]), pp=2,
            loss_fn=masked_loss if in_loss else loss_function, sample_keywords={"mask": mask[:1]},
        ) as model:  # fmt: skip
            mine = mask.to("meta" if dist.get_rank() == rank else "cpu")
            said = error_of(partial(model.train_step, *data(), mask=mine))
        assert starts(said, "ValueError: mask: is on meta, but this rank trains on cpu", rank)


def fail_in_evaluation(output: Tensor, target: Tensor) -> Tensor:
    """A loss function for training alone."""
    if not torch.is_grad_enabled():
        raise ValueError("no loss")
    return nn.functional.mse_loss(output, target)


@on_ranks(1)
def test_a_step_after_an_evaluation_that_raised() -> None:
    model = built(seeded([linear] * 2), loss_fn=fail_in_evaluation)
    assert error_of(lambda: model.eval_step(*data())).startswith("ValueError: no loss")
    assert error_of(model.state_dict) == error_of(model.full_state_dict)
    refuses(
        "RuntimeError: an earlier step raised ValueError: no loss",
        lambda: model.train_step(*data()),
    )


@on_ranks(2)
def test_no_rank_waits_for_one_whose_update_failed() -> None:
    with built(seeded([linear] * 2), pp=2) as model:
        if dist.get_rank() == RANK:
            updater: Any = model.engine.updater
            updater.update = mock.Mock(side_effect=ZeroDivisionError("no"))
        failed = error_of(lambda: model.train_step(*data()))
        assert dist.get_rank() != RANK or failed.startswith("ZeroDivisionError")
        for call in (lambda: model.save("nowhere"), model.state_dict, model.full_state_dict):
            assert starts(error_of(call), "RuntimeError: an e")


SMALL = Case(pp=1, shard=2, chunks=1, layers=1, batch=4)


def broken(*_: Any, **__: Any) -> Any:
    """Raise."""
    raise ValueError("broken here")


@on_ranks(2)
def test_saves_that_fail_on_one_rank(tmp_path: Path) -> None:
    """While it makes the directory, writes or renames: the checkpoint is then as it was."""
    place = tmp_path / "checkpoint"
    model = build_model_of(SMALL)
    model.save(place)
    for name in ("_make_empty", "_digest", "_publish"):
        model.engine.step(local_microbatches(SMALL, 0))
        full = mock.Mock(side_effect=OSError("disk full"))
        patch = mock.patch.object(checkpoint, name, full)
        with patch if dist.get_rank() == 0 else nullcontext():
            said = error_of(lambda: model.save(place))
        assert starts(said, "OSError: disk full", 0)
        model.load(place)
        assert model.steps_done == 0


@on_ranks(2)
def test_a_checkpoint_that_one_rank_does_not_see(tmp_path: Path) -> None:
    model = build_model_of(SMALL)
    model.save(tmp_path / "checkpoint")
    found = tmp_path / "checkpoint"
    said = error_of(lambda: model.load(found if dist.get_rank() == 0 else found / "elsewhere"))
    assert starts(said, "CheckpointError: ")
    assert "no checkpoint" in said


@on_ranks(3)
def test_saves_and_loads_that_one_rank_calls_wrongly(tmp_path: Path) -> None:
    mine, place = dist.get_rank() == RANK, tmp_path / "checkpoint"
    nowhere: Any = None if mine else place
    with built(pp=3) as model:
        model.save(place)
        assert starts(error_of(lambda: model.save(nowhere)), "TypeError: ")
        other = place.with_name("other") if mine else place
        assert starts(error_of(lambda: model.save(other)), "CheckpointError: ")
        assert starts(error_of(lambda: model.load(nowhere)), "TypeError: ")
        given: Any = None if mine else {}
        assert starts(error_of(lambda: model.load_state_dict(given)), "TypeError: ")


def second_lane_fails(device: torch.device, name: str) -> Lane:
    """Make the first of a rank's lanes, and raise for the second one."""
    if name == "zeropp reductions":
        broken()
    return make_lane(device, name)


@on_ranks(3)
def test_constructions_that_fail_on_one_rank() -> None:
    mine = dist.get_rank() == RANK
    said = error_of(lambda: built(pp=3, device="cuda" if mine else None))
    # Torch says why: there is no GPU, or it is in use in the process that this one was forked of.
    assert said.startswith("InfeasibleError: device='cuda': ")
    refuses(
        "InfeasibleError: device='meta': the process group has no backend",
        lambda: built(pp=3, device="meta"),
    )
    threads = set(threading.enumerate())
    for where, wrong in (
        ("zeropp.engine.engine.make_flats", broken),
        ("zeropp.engine.ranks.lanes.make_lane", second_lane_fails),
    ):
        with mock.patch(where, wrong) if mine else nullcontext():
            assert starts(error_of(lambda: built(pp=3)), "ValueError: broken here")
    new = set(threading.enumerate()) - threads
    assert [one.name for one in new if one.name.startswith("zeropp")] == []


SAVED = Case(pp=2, batch=2, unit=2, chunks=1, layers=2, tied=True, dropout=0.1)


def save_after(directory: Path, count: int, killed_in: str) -> str:
    """Train and save; in ``killed_in`` a rank dies while it writes. Gives what then was raised."""
    model = build_model_of(SAVED)
    for number in range(count):
        model.engine.step(local_microbatches(SAVED, number))
    if killed_in:
        write = state_dict_saver.save

        def fail(state: dict[str, Any], **options: Any) -> None:
            write(state, **options)
            raise KeyboardInterrupt

        state_dict_saver.save = fail
        try:
            model.save(directory)
        except KeyboardInterrupt:
            return "died"
        finally:
            state_dict_saver.save = write
    model.save(directory)
    return "saved"


def load_from(directory: Path) -> str:
    """Steps done of a checkpoint, or what its load says."""
    model = build_model_of(SAVED)
    try:
        model.load(directory)
    except CheckpointError as error:
        return str(error)
    return f"{model.steps_done} steps"


def test_the_last_whole_checkpoint_survives_a_death_while_saving(
    world: World, tmp_path: Path
) -> None:
    place = tmp_path / "checkpoint"
    assert set(world.run(save_after, place, 1, "", size=SAVED.world)) == {"saved"}
    assert set(world.run(save_after, place, 2, "the save", size=SAVED.world)) == {"died"}
    assert set(world.run(load_from, place, size=SAVED.world)) == {"1 steps"}
    assert set(world.run(save_after, place, 2, "", size=SAVED.world)) == {"saved"}
    assert set(world.run(load_from, place, size=SAVED.world)) == {"2 steps"}
    place.rename(tmp_path / "checkpoint.being-replaced")  # as between the two renames
    assert set(world.run(load_from, place, size=SAVED.world)) == {"2 steps"}
    assert set(world.run(save_after, place, 3, "", size=SAVED.world)) == {"saved"}
    assert set(world.run(load_from, place, size=SAVED.world)) == {"3 steps"}
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_a_flipped_byte_is_refused_on_every_rank(world: World, tmp_path: Path) -> None:
    place = tmp_path / "checkpoint"
    world.run(save_after, place, 1, "", size=SAVED.world)
    victim = sorted(place.glob("*.distcp"))[0]
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(content)
    (said,) = set(world.run(load_from, place, size=SAVED.world))
    assert said.startswith(f"{victim}: damaged (its digest differs)")
    victim.unlink()
    (said,) = set(world.run(load_from, place, size=SAVED.world))
    assert said.startswith(f"{victim}: missing")
    (place / "digests.json").write_text("{")
    (said,) = set(world.run(load_from, place, size=SAVED.world))
    assert said.startswith(f"{place / 'digests.json'}: damaged")


@on_ranks(2)
def test_a_checkpoint_takes_nothing_elses_place_nor_another_models(tmp_path: Path) -> None:
    """The last save goes through a link."""
    draft, target = tmp_path / "papers" / "draft.txt", tmp_path / "large disk"
    if dist.get_rank() == 0:
        draft.parent.mkdir()
        draft.write_text("years of work")
        (tmp_path / "latest").symlink_to(target)  # which is not there yet
    dist.barrier()
    with built(pp=2) as model:
        for place in (draft.parent, draft):
            said = error_of(partial(model.save, place))
            assert said.startswith(f"CheckpointError: {draft}: is no part of a whole")
        model.save(tmp_path / "latest")
        if dist.get_rank() == 0:
            (target / "scheduler.pt").write_text("of another hand")
            (tmp_path / "runs" / "step_1.distcp").mkdir(parents=True)
        dist.barrier()
        for place, name in ((target, "scheduler.pt"), (tmp_path / "runs", "step_1.distcp")):
            for save in (model.save, model.save_on_signal):
                said = error_of(partial(save, place))
                assert said.startswith(f"CheckpointError: {place / name}: is no part of a whole")
    assert draft.read_text() == "years of work"
    assert (tmp_path / "latest").is_symlink()
    assert (target / ".metadata").is_file()
    for count, words in ((5, "4.weight: is missing"), (3, "3.weight: the model has nothing of")):
        with built(seeded([linear] * count), pp=2) as other:
            said = error_of(partial(other.load, tmp_path / "latest"))
            assert said.startswith(f"CheckpointError: {target}: {words}")


def answer(what: str) -> int | Callable[[], None]:
    """This rank's number, unless it fails in one way or another."""
    if what == "raises" and dist.get_rank() == 1:
        raise ValueError("no such luck")
    if what == "dies":
        os._exit(1)
    if what == "hangs":
        time.sleep(60)
    dist.barrier()
    return (lambda: None) if what == "cannot be sent" else dist.get_rank()


@pytest.mark.timeout(300)  # of the 600 that a test may take; forks included
def test_what_a_rank_does_not_answer_is_an_error_and_the_next_task_has_a_new_world(
    world: World,
) -> None:
    for what, size, words in (
        ("raises", 2, r"(?s)rank 1: .*no such luck"),
        ("dies", 1, "rank 0: died"),
        ("hangs", 1, "no answer in time"),
        ("cannot be sent", 1, r"(?s)rank 0: .*pickle.*lambda"),
    ):
        with pytest.raises(WorkerError, match=words):
            world.run(answer, what, size=size, timeout_s=1 if what == "hangs" else 200)
    assert world.run(answer, "", size=2) == [0, 1]
