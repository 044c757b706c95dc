"""A checkpoint that is damaged, or whose save a rank does not survive."""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_saver

from tests.gloo.cases import Case, build_model_of, local_microbatches
from tests.gloo.layers import linear
from tests.gloo.models import built, error_of, seeded
from tests.gloo.world import World, on_ranks
from zeropp.engine import checkpoint
from zeropp.engine.checkpoint import CheckpointError

SAVED = Case(pp=2, batch=2, unit=2, chunks=1, layers=2, tied=True, dropout=0.1)


def save_after(directory: Path, steps: int, killed_in: str) -> str:
    """Train and save; in ``killed_in`` a rank dies while it writes. Gives what then was raised."""
    case = SAVED
    model = build_model_of(case)
    for step in range(steps):
        model.engine.step(local_microbatches(case, step))
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


def test_other_files_stay_beside_a_checkpoint(world: World, tmp_path: Path) -> None:
    place, previous = tmp_path / "checkpoint", tmp_path / "checkpoint.being-replaced"
    others = [place / "notes.txt", place / "logs" / "day.txt", place / ".hidden"]
    for name in ("previous", "partial", "old", "tmp"):  # folders of the user, in which all stays
        (tmp_path / f"checkpoint.{name}").mkdir()
        others.append(tmp_path / f"checkpoint.{name}" / "notes.txt")

    def save_and_load(steps: int) -> list[str]:
        assert set(world.run(save_after, place, steps, "", size=SAVED.world)) == {"saved"}
        assert set(world.run(load_from, place, size=SAVED.world)) == {f"{steps} steps"}
        assert not previous.exists()
        return [path.read_text() for path in others if path.is_file()]

    for path in others[3:]:
        path.write_text(path.name)
    assert save_and_load(1) == ["notes.txt"] * 4
    others[1].parent.mkdir()
    for path in others:
        path.write_text(path.name)
    kept = [path.name for path in others]
    assert save_and_load(2) == kept
    place.rename(previous)  # as between the two renames
    assert save_and_load(3) == kept
    place.rename(previous)  # as between the second one and the removal of the last checkpoint
    shutil.copytree(previous, place, ignore=lambda *_: ["notes.txt", "logs", ".hidden"])
    assert save_and_load(4) == kept


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
            assert said.startswith(f"CheckpointError: {place}: is there, but is no checkpoint")
        model.save(tmp_path / "latest")
    assert draft.read_text() == "years of work"
    assert (tmp_path / "latest").is_symlink()
    assert (target / ".metadata").is_file()
    missing = "the model has 4.bias, but it has nothing of that name, so that it is of another la"
    for count, words in ((5, missing), (3, "it has 3.bias, but the model has nothing")):
        with built(seeded([linear] * count), pp=2) as other:
            said = error_of(partial(other.load, tmp_path / "latest"))
            assert said.startswith(f"CheckpointError: {target}: {words}")


def test_two_jobs_that_save_to_one_name_wait_for_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    partial = tmp_path / "saved.being-written"
    monkeypatch.setattr(checkpoint, "_BUSY_S", 0.3)
    with ExitStack() as first:
        checkpoint._make_empty(partial, first)
        (partial / "file").touch()
        with ExitStack() as second:
            said = error_of(lambda: checkpoint._make_empty(partial, second))
            assert said.startswith(f"CheckpointError: {partial}: another job is writing it")
        assert (partial / "file").exists()
        partial.rename(tmp_path / "saved")  # which it still holds
        with ExitStack() as second:
            checkpoint._make_empty(partial, second)
        assert (tmp_path / "saved" / "file").exists()
    with ExitStack() as third:  # what a killed one has left is in nobody's way
        (partial / "file").touch()
        checkpoint._make_empty(partial, third)
        assert not any(partial.iterdir())
