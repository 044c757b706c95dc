"""A world of eight gloo processes for the tests of a module: forked from one server, so that a new
one is quick, and what one contender leaves in a process does not meet the next."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.gloo.world import World, start_server

start_server()  # it imports what ranks need while pytest imports the tests


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """Ranks to run functions on; see ``World.run``."""
    with World(8) as world:
        yield world
