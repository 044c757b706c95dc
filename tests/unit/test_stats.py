"""Medians, intervals and ratios on samples whose answer is known."""

from __future__ import annotations

import random

import pytest

from benchmarks.records.samples import ratio_of_medians, summarise


def test_summary_of_a_quiet_sample() -> None:
    summary = summarise([1.0, 1.01, 1.02, 1.0, 1.01, 1.02, 1.01])
    assert summary.median == pytest.approx(1.01)
    assert 1.0 <= summary.low <= summary.median <= summary.high <= 1.02
    assert summary.doubt == ""


@pytest.mark.parametrize(
    ("samples", "doubt"),
    [
        ([1.0], "1 step"),
        ([1.0, 1.1, 1.2, 1.3], "4 steps"),
        ([1.0, 2.0, 1.0, 3.0, 1.5, 2.5], "spread 71.4 %"),
        ([1.0, 1.001, 1.0], ""),  # a spread of 0 % leaves nothing in doubt
    ],
)
def test_few_or_scattered_samples_are_doubted_with_the_reason(
    samples: list[float], doubt: str
) -> None:
    assert summarise(samples).doubt == doubt


def test_no_samples_is_an_error() -> None:
    with pytest.raises(ValueError, match="no samples"):
        summarise([])


def test_the_same_sample_gives_the_same_interval() -> None:
    samples = [1.0, 1.2, 0.9, 1.1, 1.05, 0.97]
    assert summarise(samples) == summarise(list(samples))


def test_interval_covers_the_true_median_about_as_often_as_it_says() -> None:
    draw = random.Random(1)
    hits = 0
    for _ in range(200):
        summary = summarise([draw.gauss(1.0, 0.05) for _ in range(20)])
        hits += summary.low <= 1.0 <= summary.high
    assert 175 <= hits <= 200  # 95 % nominal


def test_samples_of_a_ratio_are_drawn_independently() -> None:
    """With the same draws for both, a sample over itself would have an interval of no width."""
    samples = [1.0, 1.2, 0.9, 1.1, 1.05, 0.97, 1.3, 0.8]
    ratio = ratio_of_medians(samples, samples)
    assert ratio.median == 1.0
    assert ratio.low < 0.99
    assert ratio.high > 1.01


def test_ratio_finds_a_real_difference_and_no_false_one() -> None:
    draw = random.Random(2)
    slow = [1.2 + 0.02 * draw.random() for _ in range(10)]
    fast = [1.0 + 0.02 * draw.random() for _ in range(10)]
    ratio = ratio_of_medians(slow, fast)
    assert ratio.low > 1.15
    same = ratio_of_medians(fast, [1.0 + 0.02 * draw.random() for _ in range(10)])
    assert same.low < 1.0 < same.high
