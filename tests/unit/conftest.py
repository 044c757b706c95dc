"""What several unit tests share. Unit tests do without torch, whose import alone takes seconds."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from benchmarks.specification import progress
from tests.unit.slurm_attempts import make_attempt, silence_slurm

# The same examples in every run, and no limit of time: a test fails because of the code alone, and
# not because of a number that was drawn or of what else the machine does.
settings.register_profile(
    "unit",
    max_examples=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("unit")
progress._FIRST_LINE_S = 1e6  # no line of progress beside a refusal, however slow the machine is


def pytest_collection_finish(session: pytest.Session) -> None:
    """Refuse a module that imports torch, where those of other folders do not."""
    alone = all(item.nodeid.startswith("tests/unit/") for item in session.items)
    if alone and "torch" in sys.modules:
        raise pytest.UsageError("a module of tests/unit imports torch")
    if alone:  # modules and tests stay to the end: the collector looks at what tests make alone
        gc.freeze()
        gc.set_threshold(50_000)


@pytest.fixture(scope="module", autouse=True)
def _without_torch() -> Iterator[None]:
    """Fails after the last test of a module if one of them has imported torch."""
    before = "torch" in sys.modules  # by tests of other folders, which may have run in between
    yield
    assert before or "torch" not in sys.modules, "a test of this module has imported torch"


@pytest.fixture
def attempt(tmp_path: Path) -> Path:
    """An attempt of a Slurm job of two ranks; each measured one step."""
    return make_attempt(tmp_path)


@pytest.fixture
def silent_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm's commands answer nothing."""
    silence_slurm(monkeypatch)
