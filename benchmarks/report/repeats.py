"""Configurations that were run several times: the median over their runs, and where the next run
will be.

The steps of one run say little about another one: a machine that is slower for a minute is slower
in all of them. So intervals come from the differences between runs. Few runs of one configuration
do not show how far they differ, but those of all configurations on a cluster's machines together
do. Times of runs are taken as log-normal with the same spread for all of them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any

import pandas as pd
from scipy.special import stdtrit

from benchmarks.records.samples import Summary

_MANY = 5  # steps of a run, at least, as a Summary counts samples
_SHARE = 0.95  # of the next runs that an interval should hold, to first order
_PLACE = ("cluster", "machine")
_RATES = ("tokens_per_s_per_gpu", "model_tflops_per_gpu", "mfu")


def half_width(runs: Sequence[int], spread: float, freedom: int) -> float:
    """Half of the interval of a logarithm: of the next run of a configuration around the median of
    its ``runs``, or, of two, of the ratio of their next runs around that of their medians. A
    median's variance is pi/2 of a mean's. The quantile is Student's."""
    quantile = float(stdtrit(freedom, (1 + _SHARE) / 2))
    return quantile * spread * math.sqrt(sum(1 + math.pi / (2 * count) for count in runs))


def pooled_spread(groups: Sequence[Sequence[float]]) -> tuple[float, int]:
    """(standard deviation of the logarithm of a run's time within its group, degrees of freedom),
    from all groups of two runs or more."""
    freedom = sum(len(group) - 1 for group in groups)
    logs = [[math.log(value) for value in group] for group in groups]
    squares = sum((x - fmean(group)) ** 2 for group in logs for x in group)
    return math.sqrt(squares / freedom) if freedom else math.nan, freedom


def ranges(rows: pd.DataFrame) -> str:
    """What the ranges of measured ``rows`` are, in words for a caption."""
    if (rows["runs"] > 1).any():
        return "95 % of next runs are in the ranges"
    return "ranges are 95 % bootstrap intervals"


def with_repeats(rows: pd.DataFrame, frame: pd.DataFrame, keys: Sequence[str]) -> pd.DataFrame:
    """The rows of ``latest_ok``, those of configurations that ran more than once with the same
    files and packages as medians over these runs. ``keys`` name a configuration in ``rows`` and
    ``frame``, and its cluster and machine are among them."""
    fine = frame[(frame["status"] == "ok") & (frame["evidence"] == "measured")]
    times = {
        key: list(group["step_s"])
        for key, group in fine[fine["software"] != ""].groupby([*keys, "software"])
        if len(group) > 1
    }
    if not times:
        return rows
    of_place: defaultdict[Any, list[list[float]]] = defaultdict(list)
    for key, group in times.items():
        of_place[*(key[keys.index(name)] for name in _PLACE)].append(group)
    spreads = {place: pooled_spread(groups) for place, groups in of_place.items()}
    lines = []
    for row in rows.to_dict("records"):
        runs = times.get(tuple(row[key] for key in [*keys, "software"]))
        if row["status"] == "ok" and runs:
            spread, freedom = spreads[*(row[name] for name in _PLACE)]
            low, high = (math.exp(s * half_width([len(runs)], spread, freedom)) for s in (-1, 1))
            faster = row["step_s"] / median(runs)
            row |= {"runs": len(runs), "run_spread": spread, "run_freedom": freedom}
            row |= {"steps_unsettled": "", "spread": spread}
            for name, best in (("step_s", median(runs)), *((n, row[n] * faster) for n in _RATES)):
                row |= {name: best, f"{name}_low": best * low, f"{name}_high": best * high}
        lines.append(row)
    return pd.DataFrame(lines, columns=rows.columns)


def ratio_of_repeats(top: Mapping[Any, Any], bottom: Mapping[Any, Any]) -> Summary:
    """The ratio of the step times of two rows of ``with_repeats`` on one cluster, at least one of
    which was repeated, with the interval of the ratio of their next runs."""
    repeated = max(top, bottom, key=lambda row: row["runs"])
    ratio = top["step_s"] / bottom["step_s"]
    runs = [int(row["runs"]) for row in (top, bottom)]
    half = half_width(runs, repeated["run_spread"], int(repeated["run_freedom"]))
    return Summary(
        median=ratio,
        low=ratio * math.exp(-half),
        high=ratio * math.exp(half),
        spread=math.nan,  # that of the steps says nothing here
        count=sum(runs) * _MANY,
    )
