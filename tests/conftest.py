"""Which tests share a process where pytest-xdist spreads them (``-n 2 --dist loadgroup``)."""

from __future__ import annotations

from pathlib import Path

import pytest

_TOGETHER = {"slurm", "gloo"}  # one Slurm, and one world of ranks at a time
_ORDER = ["slurm", "gloo", "suite", "unit"]  # what takes long, or waits, begins first
_ROOT = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Group tests by file, or by folder, and put the folders in the order of their length."""
    if config.pluginmanager.hasplugin("xdist"):
        for item in items:
            item.add_marker(pytest.mark.xdist_group(_group_of(item)))
    items.sort(key=lambda item: _ORDER.index(_folder_of(item)))


def _folder_of(item: pytest.Item) -> str:
    return item.path.relative_to(_ROOT).parts[0]


def _group_of(item: pytest.Item) -> str:
    folder = _folder_of(item)
    return folder if folder in _TOGETHER else item.path.stem
