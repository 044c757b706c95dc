"""Statistics of repeated timings: medians, bootstrap intervals, and when to say nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]

_RESAMPLES = 2000
_CONFIDENCE = 0.95
MAX_SPREAD = 0.10  # pyperf's bound: above it a timing is called unstable


@dataclass(frozen=True)
class Summary:
    """Median of a sample with its bootstrap interval; ``spread`` is the interquartile range over
    the median."""

    median: float
    low: float
    high: float
    spread: float
    count: int

    @property
    def unstable(self) -> bool:
        """The spread is too large, or the sample too small, to say much."""
        return self.count < 5 or self.spread > MAX_SPREAD


def summarise(samples: Sequence[float]) -> Summary:
    """Median with a 95 % percentile-bootstrap interval (Efron 1979); raises ValueError on none."""
    if not samples:
        raise ValueError("no samples to summarise")
    values = np.asarray(samples, dtype=float)
    low, high = _interval(_medians(values))
    quartiles = np.percentile(values, [25, 75])
    median = float(np.median(values))
    return Summary(median, low, high, float(np.ptp(quartiles)) / median, len(values))


def ratio_of_medians(numerator: Sequence[float], denominator: Sequence[float]) -> Summary:
    """Ratio of two medians with a bootstrap interval, the two samples drawn independently;
    ``spread`` is the larger of the two samples'."""
    top, bottom = summarise(numerator), summarise(denominator)
    ratios = _medians(np.asarray(numerator, dtype=float)) / _medians(
        np.asarray(denominator, dtype=float)
    )
    low, high = _interval(ratios)
    return Summary(
        median=top.median / bottom.median,
        low=low,
        high=high,
        spread=max(top.spread, bottom.spread),
        count=min(top.count, bottom.count),
    )


def _medians(values: Values) -> Values:
    """Medians of resamples; the generator is seeded, so a report is the same when made again."""
    random = np.random.default_rng(len(values))
    medians: Values = np.median(random.choice(values, size=(_RESAMPLES, len(values))), axis=1)
    return medians


def _interval(estimates: Values) -> tuple[float, float]:
    tail = 100 * (1 - _CONFIDENCE) / 2
    low, high = np.percentile(estimates, [tail, 100 - tail])
    return float(low), float(high)
