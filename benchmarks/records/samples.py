"""Statistics of repeated timings: medians, their ratios, and where the next run will be.

Times are taken as log-normal, with the same spread for all samples that are pooled. A median's
variance is pi/2 of a mean's, and the quantile of an interval is Student's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median, quantiles

from scipy.special import stdtrit

_CONFIDENCE = 0.95
MAX_SPREAD = 0.10  # a median of samples that spread more is not relied on, as in pyperf
LEAST_SAMPLES = 5


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The median of a sample with its 95 % interval from ``low`` to ``high``; ``spread`` is the
    interquartile range divided by the median."""

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


def half_width(counts: Sequence[int], spread: float, freedom: int, next_runs: int = 0) -> float:
    """Half of the interval of a logarithm: of a median, or of the ratio of two, of samples of these
    sizes. With ``next_runs=1`` it holds the next sample, or the ratio of the next ones, instead of
    the true median."""
    quantile = float(stdtrit(freedom, (1 + _CONFIDENCE) / 2)) if freedom else 0.0
    return quantile * spread * math.sqrt(sum(next_runs + math.pi / (2 * n) for n in counts))


def pooled_spread(groups: Sequence[Sequence[float]]) -> tuple[float, int]:
    """(standard deviation of the logarithm of a sample within its group, degrees of freedom), from
    all groups together; (0, 0) if no group has two samples."""
    freedom = sum(len(group) - 1 for group in groups)
    logs = [[math.log(value) for value in group] for group in groups]
    squares = sum((x - fmean(group)) ** 2 for group in logs for x in group)
    return math.sqrt(squares / freedom) if freedom else 0.0, freedom


def summarise(samples: Sequence[float]) -> Summary:
    """The median with its interval; raises ValueError if there are no samples."""
    return _summary(median(samples), samples)


def ratio_of_medians(numerator: Sequence[float], denominator: Sequence[float]) -> Summary:
    """The ratio of two medians with its interval; ``spread`` and ``count`` are those of the worse
    one of the two samples."""
    return _summary(median(numerator) / median(denominator), numerator, denominator)


def _interquartile_range(of: Sequence[float]) -> float:
    first, _, third = quantiles(of, n=4, method="inclusive") if len(of) > 1 else [0.0] * 3
    return third - first


def _summary(middle: float, *samples: Sequence[float]) -> Summary:
    factor = math.exp(half_width([len(of) for of in samples], *pooled_spread(samples)))
    return Summary(
        median=middle,
        low=middle / factor,
        high=middle * factor,
        spread=max(_interquartile_range(of) / median(of) for of in samples),
        count=min(map(len, samples)),
    )
