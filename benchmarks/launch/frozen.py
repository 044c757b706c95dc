"""Read back what an attempt was started with, also where a file of it is damaged.

``points.freeze`` writes ``spec.json`` and ``attempt.json`` into every attempt. Either may be
missing, cut off or unreadable when the attempt is closed. A point's spec is the same in all of its
attempts and in the submission that it came from, so another copy will do. Of the header nothing
is needed to keep what was measured, so what is lost is said to be unknown.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from zeropp.layout import Layout
from zeropp.timeline import Provenance


class DamagedError(ValueError):
    """An attempt that cannot be recorded; the message names the file, in one line."""


@dataclass(frozen=True)
class Header:
    """What ``attempt.json`` says. ``damage`` is why it could not be read, empty where it could."""

    launcher: str
    provenance: Provenance
    started_at: str  # ISO 8601, UTC
    git_sha: str = "unknown"
    git_dirty: bool = True
    code_digest: str = ""  # these three as the launcher saw them; the ranks' own word counts
    variant: str = ""
    plan: dict[str, Any] = field(default_factory=dict)
    damage: str = ""

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of a record that the header gives."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "damage"}

    def pp_rank(self, rank: int) -> int:
        """The pipeline rank of a rank; 0 where the plan is not known."""
        try:
            return Layout(**self.plan["layout"]).coordinates(rank)["pp"]
        except (KeyError, TypeError, ValueError, IndexError):
            return 0


_HEADER = TypeAdapter(Header)


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object; raises DamagedError that names the file and what is wrong with it."""
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise DamagedError(f"{path}: {(error.strerror or str(error)).lower()}") from None
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{path}: not readable as JSON ({error})") from None
    if not isinstance(found, dict):
        raise DamagedError(f"{path}: no JSON object")
    return found


def read_frozen_spec(directory: Path) -> dict[str, Any]:
    """The spec of an attempt as a plain mapping, from the nearest whole copy.

    It is not checked further: an attempt of another version of the suite keeps what it measured.
    Raises DamagedError where no copy can be read.
    """
    first: DamagedError | None = None
    for path in _copies(directory):
        try:
            spec = read_object(path)
            if not isinstance(spec.get("num_gpus"), int):
                raise DamagedError(f"{path}: no spec (num_gpus is missing)")
            return spec
        except DamagedError as error:
            first = first or error
    raise first or DamagedError(f"{directory}: no spec.json")


def _copies(directory: Path) -> Iterator[Path]:
    yield directory / "spec.json"
    yield from sorted(directory.parent.glob("*/spec.json"))
    submissions = directory.parents[1] / "slurm"
    yield from sorted(submissions.glob(f"*/specs/{directory.parent.name}/spec.json"))


def read_header(directory: Path) -> Header:
    """The header of an attempt; what a damaged one would say is unknown, and ``damage`` says so."""
    try:
        return _HEADER.validate_python(read_object(directory / "attempt.json"))
    except DamagedError as error:
        damage = str(error)
    except ValidationError as error:
        damage = f"{directory / 'attempt.json'}: {error.errors(include_url=False)[0]['msg']}"
    launcher = directory.name.partition("-")[0]
    provenance: Provenance = "traced" if launcher == "trace" else "measured"
    return Header(launcher, provenance, _made_at(directory), damage=damage)


def _made_at(directory: Path) -> str:
    try:
        seconds = min(p.stat().st_mtime for p in (directory, *directory.glob("rank_*")))
    except OSError:
        seconds = 0.0
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
