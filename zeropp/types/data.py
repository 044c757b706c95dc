"""The files that the project reads: facts of clusters and programs, presets, published tables."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).parents[1]
# A wheel has copies of these files inside the package; their paths below ``DATA`` are the same.
IN_WHEEL = (_PACKAGE / "data").is_dir()
DATA = _PACKAGE / "data" if IN_WHEEL else _PACKAGE.parent
