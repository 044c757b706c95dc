"""The largest of several differences, of which none is lost."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def largest(differences: Iterable[float]) -> float:
    """The largest one; NaN if one is NaN, which Python's ``max`` may drop. Raises on none."""
    return float(torch.tensor([*differences], dtype=torch.float64).max())
