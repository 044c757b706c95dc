"""How far the simulator is from published measurements.

It reads the committed rows of ``python -m benchmarks.validate``: each has a number that a paper or
vendor printed and the simulator's number for the same configuration. Every report with simulated
records shows it, because it says how wrong those may be.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks import CHECKOUT
from benchmarks.report import style
from benchmarks.report.charts import Picture
from benchmarks.report.table import Column, Table, table

VALIDATION = CHECKOUT / "results" / "reference" / "validation" / "validation.csv"
_ROLES = {"held out": style.COOL, "adjusted": style.WARM, "fitted": style.NEUTRAL}
_WORDS = {
    "speed": "speed: simulated over published - 1 [%] (above 0: the simulator is too fast)",
    "memory": "memory: simulated over published - 1 [%]",
}


def _signed(value: float) -> str:
    return f"{value:+z.1%}"


_COLUMNS = (
    Column("source", "published by"),
    Column("role", "constants"),
    Column("quantity", "quantity"),
    Column("numbers", "numbers", form=style.count),
    Column("distance", "median distance [10th, 90th percentile]", form=_signed, interval=True),
)


def published_distances(rows: pd.DataFrame) -> pd.DataFrame:
    """One row per published measurement that was predicted; none if ``rows`` have no simulated
    record. Numbers that their source computed and did not measure are left out.

    Columns: ``source``, ``role`` (whether constants were fitted on it, a trait was adjusted to
    it, or neither), ``quantity`` (speed or memory) and ``error`` = simulated / published - 1.
    """
    if "simulated" not in set(rows["evidence"]):
        return pd.DataFrame(columns=["source", "role", "quantity", "error"])
    columns = ["source", "role", "metric", "unit", "relative_error", "first_of_run"]
    table = pd.read_csv(VALIDATION, usecols=columns)
    table = table[(table["first_of_run"] == "yes") & (table["unit"] != "yes/no")]
    table = table[table["role"] != "computed"]
    memory, duration = (table["metric"].str.contains(word) for word in ("memory", "_time"))
    error = table["relative_error"]
    return pd.DataFrame(
        {
            "source": table["source"],
            "role": table["role"].str.replace("_", " "),
            "quantity": np.where(memory, "memory", "speed"),
            "error": np.where(duration, 1 / (1 + error) - 1, error),  # errors of speed, not time
        }
    )


def published_table(rows: pd.DataFrame) -> Table:
    """The median and the 10th and 90th percentile of the distances per source."""
    lines = [
        {
            "source": source,
            "role": role,
            "quantity": quantity,
            "numbers": len(errors),
            "distance": float(errors.median()),
            "distance_low": float(errors.quantile(0.1)),
            "distance_high": float(errors.quantile(0.9)),
        }
        for (quantity, role, source), errors in _by_source(published_distances(rows))
    ]
    data = pd.DataFrame(lines, index=[""] * len(lines))  # they come from no record
    return table("published", "The simulator beside published numbers", _COLUMNS, data)


def published_figure(rows: pd.DataFrame) -> Iterator[Picture]:
    """Every distance as a dot, with one line per source and one panel per quantity."""
    distances = published_distances(rows)
    if distances.empty:
        return
    yield Picture(
        section="Evidence",
        name="evidence_published",
        caption="How far the simulator is from published measurements, by source: a dot per run, "
        "the bar from the 10th to the 90th percentile, the tick the median. The simulator's "
        "constants were fitted on the grey sources. For the orange ones a trait of the program or "
        "of the machine was chosen after the error had been seen. The blue ones are held out of "
        "both, which is less than blind: the rules for most of their programs were written with "
        "their tables in view.",
        figure=_panels(distances),
    )


def _by_source(distances: pd.DataFrame) -> Iterator[tuple[tuple[str, str, str], pd.Series]]:
    keys = ["quantity", "role", "source"]
    for (quantity, role, source), group in distances.groupby(keys, sort=True):
        yield (str(quantity), str(role), str(source)), group["error"]


def _panels(distances: pd.DataFrame) -> Figure:
    lines = distances.groupby("quantity", sort=False)["source"].nunique()
    figure, axes = style.panels(
        len(lines),
        columns=1,
        width=9.0,
        height=0.6 + 0.45 * float(lines.mean()),
        heights=list(lines + 1.0),
    )
    for axis, quantity in zip(axes, lines.index, strict=True):
        _sources(axis, distances[distances["quantity"] == quantity])
        axis.set_xlabel(_WORDS[quantity])
    return figure


def _sources(axis: Axes, distances: pd.DataFrame) -> None:
    scatter = np.random.default_rng(0)
    names, most = [], 100.0  # the axis leaves out a few outliers, which the text counts
    for place, ((_, role, source), errors) in enumerate(_by_source(distances)):
        per_cent, colour = 100 * errors.to_numpy(), _ROLES[role]
        heights = place + scatter.uniform(-0.28, 0.28, len(per_cent))
        axis.scatter(per_cent, heights, s=4, color=colour, alpha=0.35, linewidths=0)
        low, middle, high = np.percentile(per_cent, [10, 50, 90])
        axis.hlines(place, low, high, color=colour, linewidth=3)
        axis.vlines(middle, place - 0.3, place + 0.3, color="black", linewidth=1.5)
        beyond = int((np.abs(per_cent) > most).sum())
        names.append(f"{source.split(' (')[0]} ({role})")
        text = f"{middle:+z.1f} %, n={len(per_cent)}" + (f", {beyond} beyond" if beyond else "")
        axis.text(1.01, place, text, transform=axis.get_yaxis_transform(), va="center", fontsize=8)
    axis.set_yticks(range(len(names)), names, fontsize=8)
    reach = min(most, 1.05 * float(np.abs(100 * distances["error"]).max()))
    axis.set_xlim(-reach, reach)
    axis.set_ylim(len(names) - 0.4, -0.6)
    axis.axvline(0, color="#333333", linewidth=0.8)
    axis.grid(axis="x")
