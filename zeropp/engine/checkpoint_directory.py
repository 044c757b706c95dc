"""The folder of a checkpoint: written beside the last one, moved to its place, checked on reading.

If a rank is killed while it saves, the last complete checkpoint stays as it was: the new one is
written into ``NAME.partial``, and takes the other's place only when every rank has written and
every file has a digest. If the job is killed between the two renames, ``NAME.previous`` is the
complete checkpoint, and ``load`` reads it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from zeropp.engine.together import together

_DIGESTS = "digests.json"  # file name -> SHA-256 of its bytes
_SEEN_S = 10.0  # for a directory of rank 0 to be seen by the others


class CheckpointError(RuntimeError):
    """A checkpoint is missing, incomplete or damaged; the message is one line."""


def write_whole(directory: Path | str, write: Callable[[Path], None]) -> None:
    """Call ``write`` with an empty directory, then put that in the place of ``directory``.

    Collective; the file system is one that all ranks see. The last checkpoint stays until the new
    one is whole and on disk. Where anything raises on one rank, every rank raises, and the last
    checkpoint is untouched. ``write`` sees to it that its files are on disk (torch's writer does).
    """
    partial = together(lambda: _beside(Path(directory), "partial"))
    _on_first_rank(lambda: _make_empty(partial))
    together(lambda: _check_seen(partial))
    together(lambda: write(partial))
    digests = _digests_over_ranks(partial)
    _on_first_rank(lambda: _publish(partial, Path(directory), digests))


def checked(directory: Path | str) -> Path:
    """The directory to read from, once every file in it is what was written; collective.

    What torch's own ``save`` has written has no digests, so nothing can be checked. Raises
    CheckpointError on every rank where a file is missing or differs.
    """
    place, expected = together(lambda: _listed(Path(directory)))
    found = _digests_over_ranks(place) if expected else {}
    for name, digest in sorted(expected.items()):
        if found.get(name) != digest:
            state = "missing" if name not in found else "damaged (its digest differs)"
            raise CheckpointError(f"{place / name}: {state}; load another checkpoint")
    return place


def _on_first_rank(work: Callable[[], None]) -> None:
    """Let rank 0 do what one rank does for all; every rank waits for it, and raises if it does."""
    together(lambda: work() if dist.get_rank() == 0 else None)


def _make_empty(partial: Path) -> None:
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)


def _check_seen(partial: Path) -> None:
    """Refuse a directory that is not the one that rank 0 has just made: what this rank would write
    there would be missing from the checkpoint. A network file system may show it a little late."""
    end = time.monotonic() + _SEEN_S
    while not partial.is_dir() or any(partial.iterdir()):
        if time.monotonic() > end:
            raise CheckpointError(
                f"{partial}: is not the empty directory that rank 0 has made (give all ranks the "
                "same directory, on a file system that all of them see); nothing was written"
            )
        time.sleep(0.1)


def _publish(partial: Path, directory: Path, digests: dict[str, str]) -> None:
    """Make the new checkpoint the one that is found, all of it on disk before it is."""
    with (partial / _DIGESTS).open("w") as file:
        json.dump(digests, file, indent=1, sort_keys=True)
        file.flush()
        os.fsync(file.fileno())
    _sync_directory(partial)
    previous = _beside(directory, "previous")
    if directory.exists():  # else what is beside it may be the only whole one
        shutil.rmtree(previous, ignore_errors=True)
        directory.rename(previous)
    partial.rename(directory)
    _sync_directory(directory.parent)
    shutil.rmtree(previous, ignore_errors=True)


def _sync_directory(directory: Path) -> None:
    """Have the names in a directory written to disk, as ``os.fsync`` does with a file's bytes."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _listed(directory: Path) -> tuple[Path, dict[str, str]]:
    """The directory that holds the whole checkpoint, and its files' digests by name; none where
    torch's own ``save`` has written it."""
    if not directory.exists() and _beside(directory, "previous").exists():
        directory = _beside(directory, "previous")
    listing = directory / _DIGESTS
    if not listing.is_file() and (directory / ".metadata").is_file():
        return directory, {}
    if not listing.is_file():
        raise CheckpointError(f"{directory}: no checkpoint (there is no {_DIGESTS})")
    return directory, json.loads(listing.read_text())


def _beside(directory: Path, suffix: str) -> Path:
    return directory.with_name(f"{directory.name}.{suffix}")


def _digests_over_ranks(directory: Path) -> dict[str, str]:
    """Digests of all files, each read by one rank; collective."""
    mine = together(lambda: _digests_of_mine(directory))
    parts: list[dict[str, str]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(parts, mine)
    return {name: digest for part in parts for name, digest in part.items()}


def _digests_of_mine(directory: Path) -> dict[str, str]:
    """Digests of the files that fall to this rank."""
    files = sorted(path for path in directory.iterdir() if path.name != _DIGESTS)
    mine = files[dist.get_rank() :: dist.get_world_size()]
    return {path.name: _digest(path) for path in mine}


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
