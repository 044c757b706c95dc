"""How far the simulators of others, and ours on the same runs, are from what was measured.

In: the recorded answers of the others, and results/reference/validation for ours. Out: tables in
Markdown. The error of a run is that of the step's time: simulated over measured, minus 1. With *one
constant taken out*, the simulated time of a run is first divided by the median of that ratio over
the other runs of the same program on the same GPU, so no run says its own constant; a run that is
alone there is left out.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd

from benchmarks import CHECKOUT
from benchmarks.report.table import markdown_table
from benchmarks.studies.simulators.install import SIMULATORS
from benchmarks.studies.validation.rows import METRICS

_REFERENCE = CHECKOUT / "results" / "reference"
ANSWERS = _REFERENCE / "simulators" / "answers.csv"
ASKED = _REFERENCE / "simulators" / "asked.txt"  # the day
_MOST_REASONS = 6


def tables() -> dict[str, Callable[[], str]]:
    """The tables of docs/simulator.md, by name."""
    return {
        "held_out": lambda: _errors(answered().query("role == 'held_out'")),
        "all": lambda: _errors(answered()),
        "refusals": lambda: _refusals(pd.read_csv(ANSWERS)),
        "versions": _versions,
    }


def answered() -> pd.DataFrame:
    """Every run that a simulator expresses and ours prices: ``theirs`` and ``ours`` are simulated
    over measured seconds."""
    asked = pd.read_csv(ANSWERS).dropna(subset="step_s")
    priced = pd.read_csv(_REFERENCE / "validation" / "validation.csv", low_memory=False)
    priced = priced[priced["first_of_run"] == "yes"].set_index("place")
    joined = asked.join(
        priced[["program", "device", "role", "metric", "relative_error"]], on="place", how="inner"
    )
    joined["theirs"] = joined["step_s"] / joined["measured_s"]
    is_time = joined["metric"].map(lambda metric: METRICS[metric].kind == "time")
    factor = 1 + joined["relative_error"]
    joined["ours"] = factor.where(is_time, 1 / factor)
    return joined


def without_constant(ratios: pd.Series, groups: list[pd.Series]) -> pd.Series:
    """Ratios over the median of the others of their group; those that are alone are left out."""
    parts = []
    for _, members in ratios.groupby(groups):
        for place in range(len(members)):
            others = members.drop(members.index[place])
            if len(others):
                parts.append(members.iloc[[place]] / others.median())
    return pd.concat(parts) if parts else ratios.iloc[:0]


def _errors(frame: pd.DataFrame) -> str:
    lines = []
    for simulator in SIMULATORS:
        own = frame[frame["simulator"] == simulator.adapter]
        cells = [simulator.label, f"{len(own):,}"]
        cells += [_distances(own["theirs"]), _bias(own["theirs"]), _distances(own["ours"])]
        groups = [own["program"], own["device"]]
        cells += [_distances(without_constant(own[who], groups)) for who in ("theirs", "ours")]
        lines.append(cells)
    heads = ["simulator", "runs", "its error", "its bias", "ours on the same runs"]
    heads += ["its error, one constant taken out", "ours, one constant taken out"]
    return markdown_table(heads, lines)


def _distances(ratios: pd.Series) -> str:
    """Median and 90th percentile of the errors."""
    if ratios.empty:
        return ""
    median, p90 = np.percentile((ratios - 1).abs(), (50, 90))
    return f"{median:.1%} / {p90:.1%}"


def _bias(ratios: pd.Series) -> str:
    return "" if ratios.empty else f"{ratios.median() - 1:+.1%}"


def _refusals(answers: pd.DataFrame) -> str:
    lines = []
    for simulator in SIMULATORS:
        own = answers[answers["simulator"] == simulator.adapter]
        reasons = own["reason"].dropna().str.replace(r"^(it ends with \w+):.*", r"\1", regex=True)
        counts = reasons.value_counts()
        words = [f"{reason} ({count})" for reason, count in counts.head(_MOST_REASONS).items()]
        rest = counts.iloc[_MOST_REASONS:].sum()
        words += [f"other reasons ({rest})"] if rest else []
        lines.append([simulator.label, f"{own['step_s'].notna().sum():,}", "; ".join(words)])
    return markdown_table(["simulator", "expresses", "cannot express (runs)"], lines)


def _versions() -> str:
    lines = []
    for simulator in SIMULATORS:
        where = f"`github:{simulator.repository}@{simulator.commit[:7]}`"
        lines.append([simulator.label, simulator.version, where if simulator.commit else "PyPI"])
    asked = ASKED.read_text(encoding="utf-8").strip()
    return markdown_table([f"asked on {asked}", "version", "from"], lines)
