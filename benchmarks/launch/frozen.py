"""Reads the files with which an attempt was started, even if some of them are damaged.

``points.freeze`` writes ``spec.json`` and ``attempt.json`` into every attempt. When the attempt is
closed, either may be missing, incomplete or unreadable. All attempts at a point and its submission
have the same spec, so another copy can be read instead. A record can be made without the header;
what it would have said is then unknown.
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
    """No record of an attempt can be made; the message is one line that names the file."""


@dataclass(frozen=True, kw_only=True)
class Header:
    """The content of ``attempt.json``. ``damage`` says why it could not be read, or is empty."""

    launcher: str
    provenance: Provenance
    started_at: str  # ISO 8601, UTC
    # The launcher's code; a record takes what rank 0 says of its own code instead, if it says it.
    git_sha: str = "unknown"
    git_dirty: bool = True
    code_digest: str = ""
    variant: str = ""
    plan: dict[str, Any] = field(default_factory=dict)
    damage: str = ""

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of a record that come from the header."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "damage"}

    def pp_rank(self, rank: int) -> int:
        """The pipeline rank of a global rank; 0 if the plan is not known."""
        try:
            return Layout(**self.plan["layout"]).coordinates(rank)["pp"]
        except (KeyError, TypeError, ValueError, IndexError):
            return 0


_HEADER = TypeAdapter(Header)


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; raises DamagedError, which names the file and the mistake."""
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
    """The spec of an attempt as a plain mapping, from the nearest copy that can be read.

    Its keys are not checked, so that attempts of other versions of the suite can be recorded, too.
    Raises DamagedError if no copy can be read.
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
    """The header of an attempt; if it is damaged, its fields are unknown, and ``damage`` says
    why."""
    try:
        return _HEADER.validate_python(read_object(directory / "attempt.json"))
    except DamagedError as error:
        damage = str(error)
    except ValidationError as error:
        damage = f"{directory / 'attempt.json'}: {error.errors(include_url=False)[0]['msg']}"
    launcher = directory.name.partition("-")[0]
    provenance: Provenance = "traced" if launcher == "trace" else "measured"
    return Header(
        launcher=launcher, provenance=provenance, started_at=_made_at(directory), damage=damage
    )


def _made_at(directory: Path) -> str:
    try:
        seconds = min(p.stat().st_mtime for p in (directory, *directory.glob("rank_*")))
    except OSError:
        seconds = 0.0
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
