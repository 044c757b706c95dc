"""Unit tests do without torch, whose import alone takes seconds."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def _without_torch() -> Iterator[None]:
    """Fails after the last unit test if one of them has imported torch."""
    before = "torch" in sys.modules  # tests of other folders may have been collected, too
    yield
    assert before or "torch" not in sys.modules, "a unit test has imported torch"
