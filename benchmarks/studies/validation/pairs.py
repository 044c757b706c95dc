"""Speed-ups: pairs of rows that differ in schedule or in parallelism alone.

The error of a pair is that of the ratio of its two values, predicted over measured.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from benchmarks.studies.validation.predict import Prediction
from benchmarks.studies.validation.rows import Row

# What must be equal; the degrees, chunks, ZeRO stage and schedule may differ. The microbatch
# belongs to the kernels' sizes and not to the parallelism.
EQUAL = (
    "source", "model", "hidden", "layers", "vocab", "seq", "gpu", "n_gpus", "micro_batch",
    "global_batch", "recompute", "dtype", "metric", "unit", "cp", "ep", "notes",
)  # fmt: skip
DIFFER = ("tp", "pp", "vp", "dp", "zero_stage", "schedule")


@dataclass(frozen=True)
class Pair:
    """Two rows by index, and the ratio of the first's value over the second's."""

    first: int
    second: int
    source: str
    measured: float
    predicted: float

    @property
    def relative_error(self) -> float:
        """Predicted ratio over measured ratio, less one."""
        return self.predicted / self.measured - 1.0


def pairs_of(rows: Sequence[Row], predictions: Sequence[Prediction | None]) -> list[Pair]:
    """All such pairs of predicted throughput rows."""
    groups: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for index, (row, prediction) in enumerate(zip(rows, predictions, strict=True)):
        if prediction is not None and prediction.kind == "throughput":
            groups[tuple(row.get(field, "") for field in EQUAL)].append(index)
    return [
        _pair(rows, predictions, i, j)
        for members in groups.values()
        for i, j in combinations(members, 2)
        if any(rows[i].get(field) != rows[j].get(field) for field in DIFFER)
    ]


def _pair(rows: Sequence[Row], predictions: Sequence[Prediction | None], i: int, j: int) -> Pair:
    first, second = predictions[i], predictions[j]
    assert first is not None
    assert second is not None
    predicted = first.value / second.value
    measured = predicted * (1 + second.relative_error) / (1 + first.relative_error)
    return Pair(i, j, rows[i].get("source", ""), measured, predicted)
