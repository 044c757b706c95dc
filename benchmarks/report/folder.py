"""The folder of a report: written beside its place, and moved there when it is complete."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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
        _move(fresh, out, [*names, _MANIFEST])
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


def _move(fresh: Path, out: Path, names: list[str]) -> None:
    for name in names:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (fresh / name).replace(out / name)
