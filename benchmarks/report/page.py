"""The report as one HTML file that needs no network: tables, pictures, provenance.

Fed by the tables and pictures that are also written on their own. Every row of a table links to
where its numbers come from (commit, machine, versions, specification, raw steps).
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd

from benchmarks.records.environment import git_state
from benchmarks.report.frame import notes_of
from benchmarks.report.picture import SavedPicture

_TEMPLATES = Path(__file__).parent / "templates"
_SECTIONS = ("Throughput", "Speed-up", "Scaling", "Memory", "Timelines", "Loss", "Evidence")
_TABLES = {
    "throughput": "Throughput",
    "memory": "Memory",
    "lone_ranks": "Memory",
    "speedup": "Speed-up",
    "evidence": "Evidence",
    "published": "Evidence",
}


@dataclass(frozen=True)
class _Table:
    """A table as text; ``sources[i]`` are the records behind row i, its own first."""

    name: str
    columns: list[str]
    rows: list[list[str]]
    sources: list[list[str]]


def write_page(
    rows: pd.DataFrame,
    tables: dict[str, pd.DataFrame],
    pictures: Sequence[SavedPicture],
    skipped: Sequence[str],
    out: Path,
) -> Path:
    """Write ``report.html`` beside the pictures' SVG files and return its path.

    ``rows`` are the frame's rows behind the tables, whose indices name their records.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
    )
    sha, dirty = git_state()
    path = out / "report.html"
    path.write_text(
        environment.get_template("report.html.j2").render(
            sections=[_section(name, tables, pictures) for name in _SECTIONS],
            summary=_summary(rows),
            notes=notes_of(rows),
            skipped=skipped,
            commit=sha[:10] + (" with local changes" if dirty else ""),
            made=datetime.now(UTC).isoformat(timespec="seconds"),
            sources=_sources(rows),
        )
    )
    return path


def _section(
    section: str, tables: dict[str, pd.DataFrame], pictures: Sequence[SavedPicture]
) -> dict[str, Any]:
    """What the template shows below one heading; tables without rows are left out."""
    return {
        "name": section,
        "tables": [
            _table(name, tables[name])
            for name, of in _TABLES.items()
            if of == section and not tables[name].empty
        ],
        "pictures": [_image(picture) for picture in pictures if picture.section == section],
    }


def _table(name: str, table: pd.DataFrame) -> _Table:
    return _Table(
        name,
        list(map(str, table.columns)),
        [[str(value) for value in line] for line in table.to_numpy()],
        [str(records).split() for records in table.index],
    )


def _image(picture: SavedPicture) -> dict[str, str]:
    """The picture's SVG file as a data address: sharp at every size, and no second file."""
    data = base64.b64encode(picture.paths[1].read_bytes()).decode()
    return {
        "name": picture.name,
        "caption": picture.caption,
        "address": f"data:image/svg+xml;base64,{data}",
    }


def _summary(rows: pd.DataFrame) -> list[tuple[str, str]]:
    def counted(column: str) -> str:
        return ", ".join(f"{n} {value}" for value, n in rows[column].value_counts().items())

    return [
        ("configurations", str(len(rows))),
        ("evidence", counted("evidence")),
        ("status", counted("status")),
        ("contenders", counted("contender")),
        ("clusters", counted("cluster")),
    ]


def _sources(rows: pd.DataFrame) -> str:
    """JSON of every row's provenance, safe inside a script element."""
    sources: dict[str, Any] = dict(zip(rows["record_id"], rows["source"], strict=True))
    return json.dumps(sources, separators=(",", ":")).replace("<", "\\u003c")
