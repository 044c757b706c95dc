"""Which code an attempt ran, by its ranks, and whether the launcher had the same code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.launch.frozen import Header

Events = list[dict[str, Any]]


def code_fields(header: Header, ranks: Mapping[int, Events]) -> dict[str, Any]:
    """Commit, dirty flag and digest for the record: those of rank 0, or of the launcher if rank 0
    has written none."""
    code = _code(ranks.get(0, []))
    if "digest" not in code:
        return {name: getattr(header, name) for name in ("git_sha", "git_dirty", "code_digest")}
    return {
        "git_sha": str(code.get("sha", "unknown")),
        "git_dirty": bool(code.get("dirty", True)),
        "code_digest": str(code["digest"]),
    }


def code_notes(header: Header, ranks: Mapping[int, Events]) -> list[str]:
    """Notes for the record if the launcher and the ranks, or some of the ranks, did not run the
    same files."""
    digests = {rank: _code(events).get("digest", "") for rank, events in sorted(ranks.items())}
    first = digests.get(0, "")
    notes = []
    if first and header.code_digest and first != header.code_digest:
        notes.append("the suite's files changed between submission and start; the ranks' count")
    others = [str(rank) for rank, digest in digests.items() if digest and digest != first]
    if first and others:
        notes.append(f"other files of the suite than on rank 0 ran on ranks {', '.join(others)}")
    return notes


def _code(events: Events) -> dict[str, Any]:
    found = [event.get("code") for event in events if event.get("event") == "environment"]
    return found[-1] if found and isinstance(found[-1], dict) else {}
