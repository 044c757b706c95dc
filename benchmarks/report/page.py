"""The report as one HTML file that needs no network: answers, tables, pictures, sources.

It takes the tables and pictures that are also written to files of their own. Every row of a table
links to the source of its numbers (commit, machine, versions, specification, raw steps).
"""

from __future__ import annotations

import base64
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd

from benchmarks.records.environment import git_state
from benchmarks.report import SECTIONS, TABLES
from benchmarks.report.charts import SavedPicture
from benchmarks.report.frame import notes_of
from benchmarks.report.table import Grid

_MANIFEST = ".report.json"  # names the files that the last report wrote


@contextmanager
def report_folder(out: Path) -> Iterator[Path]:
    """An empty folder to write into, whose files then replace those of the last report in ``out``.

    If the body raises, the last report stays as it was. Files in ``out`` that no report has written
    stay there.
    """
    out = out.resolve()
    out.parent.mkdir(parents=True, exist_ok=True)
    fresh = out.with_name(f".{out.name}.{os.getpid()}")
    fresh.mkdir()
    try:
        yield fresh
        names = sorted(str(p.relative_to(fresh)) for p in fresh.rglob("*") if p.is_file())
        (fresh / _MANIFEST).write_text(json.dumps(names, indent=1))
        _remove_last(out, set(names))
        for name in [*names, _MANIFEST]:
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            (fresh / name).replace(out / name)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _remove_last(out: Path, kept: set[str]) -> None:
    """Delete the files of the last report that this one does not replace."""
    try:
        names = json.loads((out / _MANIFEST).read_text())
    except (OSError, ValueError):
        return
    for name in set(names) - kept:
        path = out / name
        path.unlink(missing_ok=True)
        if path.parent != out and path.parent.is_dir() and not any(path.parent.iterdir()):
            path.parent.rmdir()


_TEMPLATES = Path(__file__).parent / "templates"
_LARGE = 300_000  # bytes of an SVG above which its PNG is shown instead, if that is smaller


@dataclass(frozen=True, kw_only=True)
class Page:
    """What the page shows: ``answers`` are the sentences at its top, and ``rows`` are the rows of
    the frame from which the grids were made and whose records they name."""

    rows: pd.DataFrame
    grids: Mapping[str, Sequence[Grid]]
    pictures: Sequence[SavedPicture]
    skipped: Sequence[str]
    answers: Sequence[str]


def write_page(page: Page, out: Path) -> Path:
    """Write ``report.html`` and return its path."""
    path = out / "report.html"
    sha, dirty = git_state()
    sources = dict(zip(page.rows["record_id"], page.rows["source"], strict=True))
    path.write_text(
        _environment()
        .get_template("report.html.j2")
        .render(
            paper=[grid for grid in page.grids["paper"] if grid.rows],
            sections=[_section(name, page) for name in SECTIONS],
            answers=page.answers,
            summary=_summary(page.rows),
            notes=notes_of(page.rows),
            skipped=page.skipped,
            commit=sha[:10] + (" with local changes" if dirty else ""),
            made=datetime.now(UTC).isoformat(timespec="seconds"),
            sources=json.dumps(sources, separators=(",", ":")).replace("<", "\\u003c"),
        )
    )
    return path


def table_page(name: str, grids: Sequence[Grid], out: Path) -> Path:
    """Write ``NAME.html``: the grids of one table alone."""
    path = out / f"{name}.html"
    path.write_text(_environment().get_template("one_table.html.j2").render(grids=grids))
    return path


def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _section(name: str, page: Page) -> dict[str, Any]:
    """What the template shows below one heading, without tables that have no rows."""
    grids = [g for table, found in page.grids.items() if TABLES[table][0] == name for g in found]
    return {
        "name": name,
        "grids": [grid for grid in grids if grid.rows],
        "pictures": [_image(picture) for picture in page.pictures if picture.section == name],
    }


def _image(picture: SavedPicture) -> dict[str, str]:
    """The picture as a data URL: its SVG, which is sharp at every size, or its PNG if the SVG is
    large and the PNG is smaller."""
    png, svg = picture.paths
    large = svg.stat().st_size > max(_LARGE, png.stat().st_size)
    path, kind = (png, "png") if large else (svg, "svg+xml")
    data = base64.b64encode(path.read_bytes()).decode()
    return {
        "name": picture.name,
        "caption": picture.caption,
        "address": f"data:image/{kind};base64,{data}",
    }


def _summary(rows: pd.DataFrame) -> list[tuple[str, str]]:
    def counted(column: str) -> str:
        return ", ".join(f"{n} {value}" for value, n in rows[column].value_counts().items())

    return [
        ("configurations", str(len(rows))),
        ("evidence", counted("evidence")),
        ("status", counted("status")),
        ("clusters", counted("cluster")),
    ]
