"""How far kinds of evidence (measured, traced, simulated) differ for the same configuration."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from benchmarks.report import style, words
from benchmarks.report.frame import CELL
from benchmarks.report.picture import Picture

_TRUST = [  # from the most trusted kind; the first that a configuration has is its reference
    "measured",
    "traced with real tensors",
    "traced",
    "published",
    "simulated with traced compute",
    "simulated",
]
_QUANTITIES = {"step_s": "step [s]", "peak_gib": "peak memory [GiB]"}
_SAME = [key for key in CELL if key != "evidence"]
_NAMES = [*_SAME, "contender", "layout", "quantity", "value", "kind", "reference"]
_NAMES += ["reference_kind", "error", "records"]
MAX_LINES = 40


def evidence_distances(rows: pd.DataFrame) -> pd.DataFrame:
    """One row per configuration, quantity and kind of evidence except for the most trusted one.

    ``error`` is value / reference - 1, where the reference is the most trusted kind of evidence.
    For memory, a kind of evidence also names its kind of peak, because these differ: ``resident``
    is more than tensors.
    """
    fine = rows[rows["status"] == "ok"]
    same = [*_SAME, "contender", "layout"]
    fine = fine[fine.groupby(same)["evidence"].transform("nunique") > 1]
    lines = []
    for keys, group in fine.groupby(same, sort=True):
        group = group.sort_values("evidence", key=lambda kinds: kinds.map(_TRUST.index))
        named = dict(zip(same, keys, strict=True))
        for quantity, label in _QUANTITIES.items():
            known = group[group[quantity].notna()]
            lines += [
                named | {"quantity": label} | _distance(known.iloc[0], other, quantity)
                for _, other in known.iloc[1:].iterrows()
            ]
    return pd.DataFrame(lines, columns=_NAMES)


def _distance(reference: pd.Series, other: pd.Series, quantity: str) -> dict[str, object]:
    return {
        "value": other[quantity],
        "kind": _kind(other, quantity),
        "reference": reference[quantity],
        "reference_kind": _kind(reference, quantity),
        "error": other[quantity] / reference[quantity] - 1.0,
        "records": f"{other['record_id']} {reference['record_id']}",
    }


def _kind(row: pd.Series, quantity: str) -> str:
    memory = quantity == "peak_gib" and row["memory_kind"] != "predicted"
    return f"{row['evidence']} ({row['memory_kind']})" if memory else str(row["evidence"])


def evidence_distance_figure(rows: pd.DataFrame) -> Iterator[Picture]:
    """Signed distances in per cent, with one line per configuration and one panel per quantity."""
    distances = evidence_distances(rows)
    if distances.empty:
        return
    yield Picture(
        section="Evidence",
        name="evidence_distance",
        caption="How far one kind of evidence is from a more trusted one on the same configuration "
        "(value / reference - 1); the worst of each quantity are shown.",
        figure=_lollipops(distances),
    )


def _lollipops(distances: pd.DataFrame) -> Figure:
    groups = list(distances.groupby("quantity", sort=True))
    lines = [min(MAX_LINES, len(group)) + 1.5 for _, group in groups]
    height = 0.4 + 0.36 * sum(lines) / len(lines)
    figure, axes = style.panels(len(groups), columns=1, width=8.0, height=height, heights=lines)
    for axis, (quantity, group) in zip(axes, groups, strict=True):
        worst = group.reindex(group["error"].abs().sort_values().index)[-MAX_LINES:]
        labels = [
            f"{words.model_label(str(r.model))}, {r.num_gpus} ranks, "
            f"{words.contender_label(str(r.contender))} {r.layout}\n"
            f"{r.kind} against {r.reference_kind}"
            for r in worst.itertuples()
        ]
        places, errors = np.arange(len(worst)), 100 * worst["error"].to_numpy(dtype=float)
        colours = [style.colour(name) for name in worst["contender"]]
        axis.hlines(places, 0, errors, color=colours, linewidth=2)
        axis.scatter(errors, places, color=colours, zorder=3)
        for place, error in zip(places, errors, strict=True):
            axis.annotate(
                f"{error:+.1f} %",
                (error, place),
                xytext=(6 if error >= 0 else -6, 0),
                textcoords="offset points",
                va="center",
                ha="left" if error >= 0 else "right",
                fontsize=8,
            )
        axis.axvline(0, color="#333333", linewidth=0.8)
        axis.set_yticks(places, labels, fontsize=8)
        axis.set_ylim(-0.6, len(worst) - 0.4)
        axis.margins(x=0.2)
        axis.set_xlabel(f"distance of the {str(quantity).split(' [')[0]} [%]")
    return figure
