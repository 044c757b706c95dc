"""How tests are spread over processes where pytest-xdist is asked for (``-n 2``).

The tests of one Slurm stay together, and so do those of gloo ranks, one world of which uses all
cores; of the rest a file stays together, for its fixtures.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

_TOGETHER = {"slurm", "gloo"}
_ORDER = ["slurm", "gloo", "suite", "unit"]  # what takes long, or waits, begins first
_ROOT = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the folders in the order of their length."""
    items.sort(key=lambda item: _ORDER.index(item.path.relative_to(_ROOT).parts[0]))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """Use groups of our own. (xdist's marks of groups do nothing with pytest 9.2, because they
    write a private name of it.)"""
    from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

    class ByFolderOrFile(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(
            self, nodeid: str
        ) -> str:  # private, and what xdist's own classes override
            path = Path(nodeid.partition("::")[0])
            folder = path.parent.name
            return folder if folder in _TOGETHER else path.as_posix()

    config.option.loadscopereorder = False  # the order above, not the groups' sizes
    return ByFolderOrFile(config, log)
