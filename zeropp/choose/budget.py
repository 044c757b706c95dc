"""The CPU time that a search may take."""

from __future__ import annotations

from time import process_time

_CLIMB = 0.75  # share of the budget after which a search only improves its winner
_PATIENCE = 4  # budgets after which a search that has found nothing ends


class Budget:
    """When a search ends, and when it takes first what most likely fits, by its CPU time."""

    def __init__(self, seconds: float) -> None:
        now = process_time()
        self._ends, self._gives_up = now + seconds, now + _PATIENCE * seconds
        self._hurry_at, self._climbs_at = now + seconds / 2, now + seconds * _CLIMB

    def is_over(self, *, found: bool, climbs: bool = True) -> bool:
        """Whether the search ends, where it has ``found`` something that fits or has not, or
        whether it only ``climbs`` from then on."""
        ends = self._ends if climbs else self._climbs_at
        return process_time() > (ends if found else self._gives_up)

    def hurries(self) -> bool:
        """Whether half of the time is over, for the first time."""
        if process_time() <= self._hurry_at:
            return False
        self._hurry_at = float("inf")
        return True
