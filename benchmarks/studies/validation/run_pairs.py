"""Pairs of published runs that differ only in schedule or parallelism.

The error of a pair is that of the ratio of its two values: predicted ratio over measured ratio - 1.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from benchmarks.studies.validation.predict import Prediction
from benchmarks.studies.validation.rows import PublishedRow

# The columns that may differ, and at least one of them must. The microbatch is not among them,
# because it changes the sizes of kernels.
DIFFER = (
    "tp", "pp", "chunks", "dp", "zero", "zero1_group", "zero3_group", "schedule",
    "sequence_parallel", "cuts",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two rows, by index, and the ratio of the first one's value to the second one's."""

    first: int
    second: int
    source: str
    measured: float
    predicted: float

    @property
    def relative_error(self) -> float:
        """The predicted ratio over the measured ratio, minus 1."""
        return self.predicted / self.measured - 1.0


def pairs_of(rows: Sequence[PublishedRow], predictions: Sequence[Prediction]) -> list[Pair]:
    """All pairs of predicted throughput rows with the same metric and unit."""
    groups: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for index, (row, prediction) in enumerate(zip(rows, predictions, strict=True)):
        if prediction.kind == "throughput":
            equal = tuple(pair for pair in row.run if pair[0] not in (*DIFFER, "table"))
            groups[row.metric, row.unit, equal].append(index)
    return [
        _pair(rows, predictions, i, j)
        for members in groups.values()
        for i, j in combinations(members, 2)
        if any(getattr(rows[i], field) != getattr(rows[j], field) for field in DIFFER)
    ]


def _pair(rows: Sequence[PublishedRow], predictions: Sequence[Prediction], i: int, j: int) -> Pair:
    predicted = predictions[i].value / predictions[j].value
    return Pair(
        first=i,
        second=j,
        source=rows[i].source,
        measured=rows[i].measured / rows[j].measured,
        predicted=predicted,
    )
