"""What all tests share."""

from __future__ import annotations

import random
import sys

import numpy as np
import pytest


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """What a test draws depends on no test before it; ranks are seeded by their world."""
    random.seed(0)
    np.random.seed(0)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)
