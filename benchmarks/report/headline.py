"""The comparison in one table narrow enough for a terminal and a README."""

from __future__ import annotations

import pandas as pd

from benchmarks.records.stats import Summary, ratio_of_medians
from benchmarks.report.frame import CELL, best_configuration

REFERENCE = "DeepSpeed 3D"


def headline_table(rows: pd.DataFrame) -> pd.DataFrame:
    """One row a cell and configuration: throughput, speed-up over DeepSpeed 3D's fastest, peak.

    ``rows`` are those of ``latest_ok``. Ranges are 95 % bootstrap intervals of medians; ``~``
    marks a speed-up that its samples do not settle (``doubts``).
    """
    if rows.empty:
        return rows
    lines = []
    for _, cell in rows.groupby(CELL, sort=False):
        reference = best_configuration(cell[cell["contender"] == REFERENCE])
        for _, row in cell.iterrows():
            lines.append(_line(row, reference))
    return pd.DataFrame(lines)


def _line(row: pd.Series, reference: pd.DataFrame) -> dict[str, object]:
    fine = row["status"] == "ok"
    line: dict[str, object] = {
        "model": row["model"],
        "ranks": row["num_gpus"],
        "contender": f"{row['contender']}: {row['layout']}",
        "tokens/s/rank": _throughput(row) if fine else row["status"],
        "speed-up": "-",
        "peak GiB": "-",
        "evidence": row["evidence"],
    }
    if fine and row["samples_step_s"] and not reference.empty:
        line["speed-up"] = _speedup(row, reference.iloc[0])
    if pd.notna(row.get("peak_gib")):
        line["peak GiB"] = f"{row['peak_gib']:.3f}"
    return line


def _throughput(row: pd.Series) -> str:
    """Tokens a second and rank; a traced success has none."""
    tokens = row.get("tokens_per_s_per_gpu")
    return "-" if pd.isna(tokens) else f"{tokens:,.0f}"


def _speedup(row: pd.Series, reference: pd.Series) -> str:
    if row["record_id"] == reference["record_id"]:
        return "1.00"  # by definition: there is nothing to doubt
    ratio = ratio_of_medians(reference["samples_step_s"], row["samples_step_s"])
    return ratio_text(ratio, measured=row["evidence"] == "measured")


def doubts(ratio: Summary) -> list[str]:
    """Why its samples do not settle a measured ratio; empty where they do."""
    reasons = []
    if ratio.unstable:
        reasons.append(f"unstable: spread {ratio.spread:.0%}, n={ratio.count}")
    if ratio.low <= 1.0 <= ratio.high:
        reasons.append("interval includes 1: no difference shown")
    return reasons


def ratio_text(ratio: Summary, *, measured: bool) -> str:
    """The ratio with its interval and, where there are ``doubts``, ``~``; a number that was not
    measured has neither."""
    if not measured:
        return f"{ratio.median:.2f}"
    mark = "~" if doubts(ratio) else ""
    return f"{mark}{ratio.median:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]"
