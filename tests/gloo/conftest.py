"""One world of eight gloo processes for all tests here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.gloo.world import World


@pytest.fixture(scope="session")
def world() -> Iterator[World]:
    """Ranks to run functions on; see ``World.run``."""
    with World(8) as world:
        yield world
