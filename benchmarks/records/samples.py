"""Statistics of repeated timings: medians and their ratios, with bootstrap intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]

_RESAMPLES = 2000
_CONFIDENCE = 0.95
MAX_SPREAD = 0.10  # a median of samples that spread more is not relied on, as in pyperf
LEAST_SAMPLES = 5


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The median of a sample with its bootstrap interval from ``low`` to ``high``; ``spread`` is
    the interquartile range divided by the median."""

    median: float
    low: float
    high: float
    spread: float
    count: int

    @property
    def agrees(self) -> bool:
        """Whether there are several samples whose spread rounds to 0 %: nothing is in doubt."""
        return self.count > 1 and self.spread < 0.005

    @property
    def doubt(self) -> str:
        """Why the median cannot be relied on, as in ``spread 12.3 %`` or ``3 steps``; empty if it
        can."""
        if self.count < LEAST_SAMPLES and not self.agrees:
            return f"{self.count} step{'s' * (self.count > 1)}"
        return f"spread {100 * self.spread:.1f} %" if self.spread > MAX_SPREAD else ""


def summarise(samples: Sequence[float]) -> Summary:
    """The median with a 95 % percentile-bootstrap interval (Efron 1979); raises ValueError if there
    are no samples."""
    if not samples:
        raise ValueError("no samples to summarise")
    values = np.asarray(samples, dtype=float)
    low, high = _interval(_medians(values))
    return Summary(
        median=float(np.median(values)),
        low=low,
        high=high,
        spread=_spread(values),
        count=len(values),
    )


def ratio_of_medians(numerator: Sequence[float], denominator: Sequence[float]) -> Summary:
    """The ratio of two medians with a bootstrap interval for which both samples are drawn
    independently; ``spread`` is the larger one of the two samples."""
    return _ratio(tuple(numerator), tuple(denominator))


@lru_cache(maxsize=2**14)  # several tables and figures ask for the same pairs
def _ratio(numerator: tuple[float, ...], denominator: tuple[float, ...]) -> Summary:
    top, bottom = np.asarray(numerator, dtype=float), np.asarray(denominator, dtype=float)
    low, high = _interval(_medians(top, stream=0) / _medians(bottom, stream=1))
    return Summary(
        median=float(np.median(top) / np.median(bottom)),
        low=low,
        high=high,
        spread=max(_spread(top), _spread(bottom)),
        count=min(len(top), len(bottom)),
    )


@lru_cache(maxsize=64)
def _draws(count: int, stream: int) -> NDArray[np.int64]:
    """The indices of all resamples. The seed is fixed, so that a report that is made again is the
    same."""
    random = np.random.default_rng((count, stream))
    return random.integers(0, count, size=(_RESAMPLES, count))


@lru_cache(maxsize=64)
def _middles(count: int, stream: int) -> NDArray[np.int64]:
    """The positions [resamples, 2], in the sorted sample, of the two middle values of every
    resample. They do not depend on the values, so they are computed once per sample size."""
    ranks = np.sort(_draws(count, stream), axis=1)
    return ranks[:, [(count - 1) // 2, count // 2]]


def _spread(values: Values) -> float:
    """Interquartile range over the median."""
    return float(np.ptp(np.percentile(values, [25, 75])) / np.median(values))


def _medians(values: Values, stream: int = 0) -> Values:
    """The median of each resample."""
    medians: Values = np.sort(values)[_middles(len(values), stream)].mean(axis=1)
    return medians


def _interval(estimates: Values) -> tuple[float, float]:
    tail = 100 * (1 - _CONFIDENCE) / 2
    low, high = np.percentile(estimates, [tail, 100 - tail])
    return float(low), float(high)
