"""Whether the losses of a run are those of its model: a run that leaves the band has failed."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from zeropp.types.tolerances import TOLERANCES


def beyond(losses: Sequence[float], right: Sequence[float], precision: str) -> str:
    """Where losses first are no numbers or leave the band around the right ones, in words; empty if
    they stay in it. There may be fewer right ones than losses, or none."""
    for step, loss in enumerate(losses, start=1):
        if not math.isfinite(loss):
            return f"step {step}: loss {loss} is not a finite number"
    for step, (loss, wanted) in enumerate(zip(losses, right, strict=False), start=1):
        if not abs(loss - wanted) <= TOLERANCES[precision].run * wanted:
            return (
                f"step {step}: loss {loss:.4f}, but {wanted:.4f} is right (a run may differ by "
                f"{TOLERANCES[precision].run:.0%} in {precision})"
            )
    return ""


def distance(losses: Sequence[float], right: Sequence[float]) -> float:
    """The largest distance of any step's loss, relative to the right one."""
    return max(abs(loss - wanted) / wanted for loss, wanted in zip(losses, right, strict=True))


@dataclass(frozen=True)
class Losses:
    """The losses of a run; ``trained`` names all that they depend on except the contender."""

    trained: str
    contender: str
    precision: str
    values: Sequence[float]


def apart_from_others(runs: Sequence[Losses]) -> dict[int, str]:
    """The places of the runs whose losses leave the band around all contenders' at the same step,
    and where, in words.

    What is right is the median of the contenders that trained the same, each by the median of its
    runs. Which of two that differ is wrong is not known, and both are named.
    """
    of = defaultdict[str, defaultdict[str, list[Sequence[float]]]](lambda: defaultdict(list))
    for run in runs:
        of[run.trained][run.contender].append(run.values)
    medians = {t: {name: _medians(values) for name, values in by.items()} for t, by in of.items()}
    found = {}
    for place, run in enumerate(runs):
        alike = dict(medians[run.trained])
        if len(alike) < 3:
            del alike[run.contender]
        if why := beyond(run.values, _medians([*alike.values()]), run.precision):
            found[place] = why.replace("is right", "by the other contenders")
    return found


def _medians(runs: Sequence[Sequence[float]]) -> list[float]:
    """The median of each step that any of the runs has; a NaN counts as infinitely large, since it
    has no place in an order."""
    steps = max(map(len, runs), default=0)
    return [
        median(math.inf if math.isnan(run[step]) else run[step] for run in runs if step < len(run))
        for step in range(steps)
    ]
