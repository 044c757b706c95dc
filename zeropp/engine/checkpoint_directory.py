"""A checkpoint's directory: written beside the last one, moved into its place, checked on reading.

A rank that is killed while it saves leaves the last whole checkpoint as it was: the new one is
written into ``NAME.partial``, and only when every rank has written and every file has a digest do
the two change places. Should the job die between the two renames, ``NAME.previous`` is the whole
one, and ``load`` takes it.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

_DIGESTS = "digests.json"  # file name -> SHA-256 of its bytes


class CheckpointError(RuntimeError):
    """A checkpoint that is not there, not whole, or not what was written; one line."""


def write_whole(directory: Path, write: Callable[[Path], None]) -> None:
    """Call ``write`` with an empty directory, then put that in the place of ``directory``.

    Collective; the file system is one that all ranks see. The last checkpoint stays until the new
    one is whole. Raises what ``write`` raises, with the last checkpoint untouched.
    """
    partial = _beside(directory, "partial")
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    write(partial)
    dist.barrier()
    digests = _digests_over_ranks(partial)
    if dist.get_rank() == 0:
        (partial / _DIGESTS).write_text(json.dumps(digests, indent=1, sort_keys=True))
        previous = _beside(directory, "previous")
        if directory.exists():  # else what is beside it may be the only whole one
            shutil.rmtree(previous, ignore_errors=True)
            directory.rename(previous)
        partial.rename(directory)
        shutil.rmtree(previous, ignore_errors=True)
    dist.barrier()


def checked(directory: Path) -> Path:
    """The directory to read from, once every file in it is what was written; collective.

    Raises the same CheckpointError on every rank.
    """
    if not directory.exists() and _beside(directory, "previous").exists():
        directory = _beside(directory, "previous")
    listing = directory / _DIGESTS
    if not listing.is_file():
        raise CheckpointError(f"{directory}: no checkpoint (there is no {_DIGESTS})")
    expected = json.loads(listing.read_text())
    found = _digests_over_ranks(directory)
    for name, digest in sorted(expected.items()):
        if found.get(name) != digest:
            state = "missing" if name not in found else "not as it was written (its digest differs)"
            raise CheckpointError(f"{directory / name}: {state}; load another checkpoint")
    return directory


def _beside(directory: Path, suffix: str) -> Path:
    return directory.with_name(f"{directory.name}.{suffix}")


def _digests_over_ranks(directory: Path) -> dict[str, str]:
    """Digests of all files, each read by one rank."""
    files = sorted(path for path in directory.iterdir() if path.name != _DIGESTS)
    mine = {path.name: _digest(path) for path in files[dist.get_rank() :: dist.get_world_size()]}
    parts: list[dict[str, str]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(parts, mine)
    return {name: digest for part in parts for name, digest in part.items()}


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
