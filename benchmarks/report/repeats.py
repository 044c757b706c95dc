"""Configurations that were run several times: the median over their runs, and where the next run
will be.

The steps of one run say little about another one: a machine that is slower for a minute is slower
in all of them. So intervals come from the differences between runs. Few runs of one configuration
do not show how far they differ, but those of all configurations on a cluster's machines together
do (``benchmarks.records.samples``).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import pandas as pd

from benchmarks.records.samples import LEAST_SAMPLES, Summary, half_width, pooled_spread

_PLACE = ("cluster", "machine")
_RATES = ("tokens_per_s_per_gpu", "model_tflops_per_gpu", "mfu")


def ranges(rows: pd.DataFrame) -> str:
    """What the ranges of measured ``rows`` are, in words for a caption."""
    if (rows["runs"] > 1).any():
        return "95 % of next runs are in the ranges"
    return "ranges are 95 % intervals"


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
            factor = math.exp(half_width([len(runs)], spread, freedom, next_runs=1))
            faster = row["step_s"] / median(runs)
            row |= {"runs": len(runs), "run_spread": spread, "run_freedom": freedom}
            row |= {"steps_unsettled": "", "spread": spread}
            for name, best in (("step_s", median(runs)), *((n, row[n] * faster) for n in _RATES)):
                row |= {name: best, f"{name}_low": best / factor, f"{name}_high": best * factor}
        lines.append(row)
    return pd.DataFrame(lines, columns=rows.columns)


def ratio_of_repeats(top: Mapping[Any, Any], bottom: Mapping[Any, Any]) -> Summary:
    """The ratio of the step times of two rows of ``with_repeats`` on one cluster, at least one of
    which was repeated, with the interval of the ratio of their next runs."""
    repeated = max(top, bottom, key=lambda row: row["runs"])
    ratio = top["step_s"] / bottom["step_s"]
    runs = [int(row["runs"]) for row in (top, bottom)]
    factor = math.exp(
        half_width(runs, repeated["run_spread"], int(repeated["run_freedom"]), next_runs=1)
    )
    return Summary(
        median=ratio,
        low=ratio / factor,
        high=ratio * factor,
        spread=math.nan,  # that of the steps says nothing here
        count=sum(runs) * LEAST_SAMPLES,
    )
