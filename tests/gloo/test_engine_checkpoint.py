"""A checkpoint that is damaged, or whose save a rank does not survive."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_saver

from tests.gloo.cases import Case, build_model_of, local_microbatches
from tests.gloo.layers import linear
from tests.gloo.models import built, error_of, seeded
from tests.gloo.world import World, on_ranks
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
