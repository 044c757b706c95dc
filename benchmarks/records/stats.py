"""Statistics of repeated timings: medians, bootstrap intervals, and when to say nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

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
    return Summary(float(np.median(values)), low, high, _spread(values), len(values))


def ratio_of_medians(numerator: Sequence[float], denominator: Sequence[float]) -> Summary:
    """Ratio of two medians with a bootstrap interval, the two samples drawn independently;
    ``spread`` is the larger of the two samples'."""
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


def paired_ratio(ratios: Sequence[float]) -> Summary:
    """Geometric mean of ratios taken in pairs (one a cell), with a bootstrap interval over the
    pairs; ``median`` holds the mean, ``spread`` the interquartile range over it."""
    if not ratios:
        raise ValueError("no pairs to summarise")
    logs = np.log(np.asarray(ratios, dtype=float))
    means = np.exp(logs[_draws(len(logs), 0)].mean(axis=1))
    low, high = _interval(means)
    mean = float(np.exp(logs.mean()))
    quartiles = np.percentile(np.exp(logs), [25, 75])
    return Summary(mean, low, high, float(np.ptp(quartiles)) / mean, len(ratios))


@lru_cache(maxsize=64)
def _draws(count: int, stream: int) -> NDArray[np.int64]:
    """Indices of all resamples; seeded, so that a report is the same when it is made again."""
    random = np.random.default_rng((count, stream))
    return random.integers(0, count, size=(_RESAMPLES, count))


@lru_cache(maxsize=64)
def _middles(count: int, stream: int) -> NDArray[np.int64]:
    """Ranks [resamples, 2] of the two middle values of all resamples. Which ranks a resample draws
    does not depend on the values, so they are sorted once for all samples of a size."""
    ranks = np.sort(_draws(count, stream), axis=1)
    return ranks[:, [(count - 1) // 2, count // 2]]


def _spread(values: Values) -> float:
    """Interquartile range over the median."""
    return float(np.ptp(np.percentile(values, [25, 75])) / np.median(values))


def _medians(values: Values, stream: int = 0) -> Values:
    """Of each resample."""
    medians: Values = np.sort(values)[_middles(len(values), stream)].mean(axis=1)
    return medians


def _interval(estimates: Values) -> tuple[float, float]:
    tail = 100 * (1 - _CONFIDENCE) / 2
    low, high = np.percentile(estimates, [tail, 100 - tail])
    return float(low), float(high)
