"""A world of eight gloo processes for the tests of a module: forked from one server, so that a new
one is quick, and what one contender leaves in a process does not meet the next."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.gloo.world import World, start_server


def pytest_configure(config: pytest.Config) -> None:
    """Start the server, which imports what ranks need while pytest imports the tests; not in a
    process that only hands tests out to others."""
    if config.getoption("dist", "no") == "no":
        # Else torch, before it compiles for a CPU, compiles six programs to find out which vectors
        # the compiler has.
        os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")
        start_server()


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """As ranks do, the process with the tests leaves the other cores to other processes."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """Ranks to run functions on; see ``World.run``."""
    with World(8) as world:
        yield world
