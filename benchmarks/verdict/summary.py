"""The verdict as one page of Markdown, for whoever reads the study's folder."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from baselines.zeropp.contender import ZEROPP
from benchmarks.report.table import markdown_table
from benchmarks.verdict.judge import (
    BASELINES,
    CLAIM,
    COMPARABLE,
    EQUAL,
    JUDGED,
    MODES,
    TIE,
    reached,
    unfit,
)
from benchmarks.verdict.uncertainty import Uncertainty


def summary(verdicts: pd.DataFrame, uncertainty: Uncertainty) -> str:
    """The verdict in Markdown: counts, then all cells at the clusters' own bandwidth. Best plans
    have the ``uncertainty`` of their ratios."""
    own = verdicts[verdicts.bandwidth == 1.0]
    lines = ["# Verdict on the 33 % (simulated)", "", ZEROPP.caveat, ""]
    for mode, setting in MODES.items():
        cells = own[own["mode"] == mode]
        if cells.empty:
            continue
        lines += [f"## Every contender at {setting}"]
        for name in BASELINES if mode == "best" else EQUAL:
            error = _with_error(uncertainty, name) if mode == "best" else ""
            lines += ["", _counts(cells, name) + error + unfit(cells, name)]
        lines += ["", _table(cells, JUDGED if mode == "best" else EQUAL), ""]
    return "\n".join(lines)


def _counts(cells: pd.DataFrame, name: str) -> str:
    speedups, label = cells[f"speedup_over_{name}"].dropna(), BASELINES[name]
    fast, comparable = reached(cells, name)
    return (
        f"Over {label}: {len(speedups)} cells, "
        f"median {speedups.median():.2f}, cells from {speedups.min():.2f} "
        f"to {speedups.max():.2f}; at least {CLAIM} in {fast}, {comparable} of them with at most "
        f"{COMPARABLE} times its memory, "
        f"faster by more than {TIE:.0%} in {(speedups > 1 + TIE).sum()}, slower by more than "
        f"{TIE:.0%} in {(speedups < 1 - TIE).sum()}."
    )


def _with_error(uncertainty: Uncertainty, name: str) -> str:
    """The medians over a row and the number of cells at the claim, each with its error."""
    medians = [f"{median.text} with {words}" for words, median in uncertainty.medians[name].items()]
    count = uncertainty.reached(name)
    return (
        f" With the simulator's errors (90 % of draws), the median is {', and '.join(medians)}; at "
        f"least {CLAIM} in {count.low:.0f} to {count.high:.0f} cells."
    )


def _table(rows: pd.DataFrame, judged: Sequence[str]) -> str:
    """One row per cell: speeds and memory, then speed-up and verdict over each judged row. A
    speed-up of best plans has the ends of its error."""
    names = ["zeropp", *judged]
    labels = {"zeropp": "ZeroPP", **BASELINES}
    head = ["model", "cluster", "GPUs", "batch"]
    head += [f"{labels[n]} tokens/s/GPU (GiB)" for n in names]
    head += [f"over {labels[name]}" for name in judged] + ["regime"]
    lines = []
    for _, row in rows.iterrows():
        cells = [row["model"], row["cluster"], str(row["num_gpus"]), str(row["global_batch"])]
        cells += [_speed(row, name) for name in names]
        cells += [f"{_ratio(row, name)}: {row[f'verdict_over_{name}']}" for name in judged]
        lines.append([*cells, row["regime"]])
    return markdown_table(head, lines)


def _ratio(row: pd.Series, name: str) -> str:
    value, low, high = (row[f"{word}_over_{name}"] for word in ("speedup", "low", "high"))
    if pd.isna(value):
        return "-"
    return f"{value:.2f}" if pd.isna(low) else f"{value:.2f} [{low:.2f}, {high:.2f}]"


def _speed(row: pd.Series, name: str) -> str:
    speed = row[f"{name}_tokens_per_s_per_gpu"]
    if pd.isna(speed):
        return "does not fit"
    share = row[f"{name}_share_of_limit"]
    return f"{speed:,.0f} ({row[f'{name}_peak_gib']:.0f}; {100 * share:.0f} % of the limit)"
