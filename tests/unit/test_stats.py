"""Medians, intervals and ratios on samples whose answer is known."""

from __future__ import annotations

import math
import random

import pytest

from benchmarks.records.samples import half_width, ratio_of_medians, summarise


@pytest.mark.parametrize(
    ("samples", "doubt"),
    [
        ([1.0], "1 step"),
        ([1.0, 1.1, 1.2, 1.3], "4 steps"),
        ([1.0, 2.0, 1.0, 3.0, 1.5, 2.5], "spread 71.4 %"),
        ([1.0, 1.001, 1.0], ""),  # a spread of 0 % leaves nothing in doubt
        ([1.0, 1.01, 1.02, 1.0, 1.01, 1.02, 1.01], ""),
    ],
)
def test_few_or_scattered_samples_are_doubted_with_the_reason(
    samples: list[float], doubt: str
) -> None:
    summary = summarise(samples)
    assert summary.doubt == doubt
    assert summary.low <= summary.median <= summary.high
    assert (summary.low < summary.high) == (len(samples) > 1)


def test_no_samples_is_an_error() -> None:
    with pytest.raises(ValueError, match="no samples"):
        summarise([])


def test_few_samples_have_wide_intervals() -> None:
    for width, next_runs in ((math.sqrt(1 + math.pi / 4), 1), (math.sqrt(math.pi / 4), 0)):
        # Student's quantiles are those of any table.
        assert half_width([2], 1.0, 1, next_runs) == pytest.approx(12.706 * width, rel=1e-4)
        assert half_width([2], 1.0, 30, next_runs) == pytest.approx(2.0423 * width, rel=1e-4)


def test_intervals_cover_the_truth_about_as_often_as_they_say() -> None:
    draw = random.Random(1)
    hits = ratios = 0
    for _ in range(200):
        first, second = ([draw.gauss(1.0, 0.05) for _ in range(20)] for _ in range(2))
        summary, ratio = summarise(first), ratio_of_medians(first, second)
        hits += summary.low <= 1.0 <= summary.high
        ratios += ratio.low <= 1.0 <= ratio.high
    assert 180 <= hits <= 198  # 95 % nominal
    assert 180 <= ratios <= 198


def test_ratio_finds_a_real_difference() -> None:
    draw = random.Random(2)
    slow, fast = ([base + 0.02 * draw.random() for _ in range(10)] for base in (1.2, 1.0))
    assert ratio_of_medians(slow, fast).low > 1.15
