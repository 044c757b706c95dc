"""How far one kind of evidence is from another, and the simulator from published measurements.

Kinds of evidence are compared where the records have several of them for one configuration. The
published measurements are the committed rows of ``zeropp validate``: each has a
number that a paper or vendor printed and the simulator's number for the same configuration. Every
report with simulated records shows them, because they say how wrong those may be.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks import CHECKOUT
from benchmarks.report import DEFAULTS, Options, display, style
from benchmarks.report.charts import Picture
from benchmarks.report.frame import CELL
from benchmarks.report.table import Column, Table, key_columns, table

_TRUST = [  # from the most trusted kind; the first that a configuration has is its reference
    "measured",
    "traced",
    "published",
    "replayed",
    "simulated",
]
_QUANTITIES = {"step_s": "step [s]", "peak_gib": "peak memory [GiB]"}
_SAME = [key for key in CELL if key not in ("evidence", "machine", "environment")]
_OF_STEPS = ("model", "cluster", "optimizer")  # settings that a simulated step depends on
MAX_LINES = 40
VALIDATION = CHECKOUT / "results" / "reference" / "validation" / "validation.csv"
_ROLES = {"held out": style.COOL, "adjusted": style.WARM, "fitted": style.NEUTRAL}
_WORDS = {
    "speed": "speed: simulated over published - 1 [%] (above 0: the simulator is too fast)",
    "memory": "memory: simulated over published - 1 [%]",
}


_COLUMNS = (
    Column("source", "published by"),
    Column("role", "constants"),
    Column("quantity", "quantity"),
    Column("numbers", "numbers", form=display.count),
    Column(
        "distance", "median distance [10th, 90th percentile]", form="{:+z.1%}".format, interval=True
    ),
)


def evidence_distances(rows: pd.DataFrame) -> pd.DataFrame:
    """One row per configuration, quantity and kind of evidence except for the most trusted one.

    ``error`` is value / reference - 1, where the reference is the most trusted kind of evidence.
    For memory, a kind of evidence also names its kind of peak, because these differ: ``resident``
    is more than tensors.
    """
    fine = rows[rows["status"] == "ok"]
    kind, memory = fine["evidence"], fine["memory_kind"]
    peak = kind.where(memory == "predicted", kind + " (" + memory + ")")
    settings = [
        sorted(item for item in of.items() if item[0].startswith(_OF_STEPS))
        for of in fine["settings"]
    ]
    fine = fine.assign(kind_of_step_s=kind, kind_of_peak_gib=peak, setting=list(map(str, settings)))
    same = [*_SAME, "contender", "layout"]
    fine = fine[fine.groupby(same)["evidence"].transform("nunique") > 1]
    lines = []
    for keys, group in fine.groupby(same, sort=True):
        group = group.sort_values("evidence", key=lambda kinds: kinds.map(_TRUST.index))
        for quantity, label in _QUANTITIES.items():
            reference, *others = group[group[quantity].notna()].to_dict("records") or [{}]
            for other in others:
                lines.append(
                    dict(zip(same, keys, strict=True))
                    | {name: reference[name] for name in display.varied(rows)}
                    | {
                        "quantity": label,
                        "value": other[quantity],
                        "kind": other[f"kind_of_{quantity}"],
                        "reference": reference[quantity],
                        "reference_kind": reference[f"kind_of_{quantity}"],
                        "error": other[quantity] / reference[quantity] - 1.0,
                        "records": f"{other['record_id']} {reference['record_id']}",
                    }
                )
    return pd.DataFrame(lines, columns=None if lines else same)


def evidence_distance_figure(rows: pd.DataFrame, options: Options = DEFAULTS) -> Iterator[Picture]:
    """Signed distances in per cent, with one line per configuration and one panel per quantity."""
    distances = evidence_distances(rows)
    if distances.empty:
        return
    groups = list(distances.groupby("quantity", sort=True))
    lines = [min(MAX_LINES, len(group)) + 1.5 for _, group in groups]
    height = 0.4 + 0.36 * sum(lines) / len(lines)
    figure, axes = style.panels(len(groups), columns=1, width=8.0, height=height, heights=lines)
    for axis, (quantity, group) in zip(axes, groups, strict=True):
        worst = group.reindex(group["error"].abs().sort_values().index)[-MAX_LINES:]
        labels = [
            f"{display.model_label(str(r['model']))}, {r['num_gpus']} ranks, "
            f"{display.contender_label(str(r['contender']))} {r['layout']}"
            + display.setting_words(r, display.varied(worst))
            + f"\n{r['kind']} against {r['reference_kind']}"
            for r in worst.to_dict("records")
        ]
        places, errors = np.arange(len(worst)), 100 * worst["error"].to_numpy(dtype=float)
        colours = [style.colour(name) for name in worst["contender"]]
        axis.hlines(places, 0, errors, color=colours, linewidth=2)
        axis.scatter(errors, places, color=colours, zorder=3)
        for place, error in zip(places, errors, strict=True):
            style.beside(axis, error, float(place), f"{error:+.1f} %", 6 if error >= 0 else -6)
        axis.axvline(0, color="#333333", linewidth=0.8)
        axis.set_yticks(places, labels, fontsize=8)
        axis.set_ylim(-0.6, len(worst) - 0.4)
        axis.margins(x=0.2)
        axis.set_xlabel(f"distance of the {str(quantity).split(' [')[0]} [%]")
    yield Picture(
        name="evidence_distance",
        caption="How far one kind of evidence is from a more trusted one on the same configuration "
        "(value / reference - 1); the worst of each quantity are shown.",
        figure=figure,
    )


def evidence_table(rows: pd.DataFrame, options: Options = DEFAULTS) -> Table:
    """The table of distances between the kinds of evidence of one configuration."""
    distances = evidence_distances(rows)
    columns = (
        *(c for c in key_columns(rows) if c.name not in ("evidence", "basis")),
        Column("layout", "layout"),
        Column("quantity", "quantity"),
        Column("value", "this", form="{:.4g}".format),
        Column("kind", "kind of this"),
        Column("reference", "reference", form="{:.4g}".format),
        Column("reference_kind", "kind of the reference"),
        Column("error", "distance", form="{:+.1%}".format),
    )
    return table("evidence", "Kinds of evidence", columns, distances)


def published_errors(*more: str) -> pd.DataFrame:
    """One row per published measurement that was predicted, with ``more`` columns of the table.

    Columns: ``source``, ``role`` (whether constants were fitted on it, a trait was adjusted to
    it, or neither), ``program``, ``device``, ``quantity`` (speed or memory) and ``error`` =
    simulated / published - 1.
    """
    named = ["source", "role", "program", "device", *more]
    columns = [*named, "metric", "unit", "relative_error", "first_of_run"]
    table = pd.read_csv(VALIDATION, usecols=columns)
    table = table[(table["first_of_run"] == "yes") & (table["unit"] != "yes/no")]
    memory, duration = (table["metric"].str.contains(word) for word in ("memory", "_time"))
    error = table["relative_error"]
    return table[named].assign(
        role=table["role"].str.replace("_", " "),
        quantity=np.where(memory, "memory", "speed"),
        error=np.where(duration, 1 / (1 + error) - 1, error),  # errors of speed, not time
    )


def published_distances(rows: pd.DataFrame) -> pd.DataFrame:
    """``published_errors``; none if ``rows`` have no simulated record."""
    errors = published_errors()
    return errors if "simulated" in set(rows["evidence"]) else errors.iloc[:0]


def published_table(rows: pd.DataFrame, options: Options = DEFAULTS) -> Table:
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
    return table(
        "published", "The simulator beside published numbers", _COLUMNS, pd.DataFrame(lines)
    )


def published_figure(rows: pd.DataFrame, options: Options = DEFAULTS) -> Iterator[Picture]:
    """Every distance as a dot, with one line per source and one panel per quantity."""
    distances = published_distances(rows)
    if distances.empty:
        return
    yield Picture(
        name="evidence_published",
        caption="How far the simulator is from published measurements, by source: a dot per run, "
        "the bar from the 10th to the 90th percentile, the tick the median. The simulator's "
        "constants were fitted on the grey sources. For the orange ones a trait of the program or "
        "of the machine was chosen after the error had been seen. The blue ones are held out of "
        "both, which is less than blind: the rules for most of their programs were written with "
        "their tables in view.",
        figure=errors_figure(distances),
    )


def _by_source(distances: pd.DataFrame) -> Iterator[tuple[tuple[str, str, str], pd.Series]]:
    keys = ["quantity", "role", "source"]
    for (quantity, role, source), group in distances.groupby(keys, sort=True):
        yield (str(quantity), str(role), str(source)), group["error"]


def errors_figure(distances: pd.DataFrame) -> Figure:
    """Every ``error`` as a dot, a line per ``source`` and ``role``, a panel per ``quantity``."""
    lines = distances.groupby("quantity", sort=False)["source"].nunique()
    height, heights = 0.6 + 0.45 * float(lines.mean()), list(lines + 1.0)
    figure, axes = style.panels(len(lines), 1, width=9.0, height=height, heights=heights)
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
