"""Two contenders in the same cell: their speed-up, and whether its samples settle it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pandas as pd

from benchmarks.records.stats import Summary, ratio_of_medians
from benchmarks.report.frame import CELL, best_configuration

BASE = "deepspeed_3d"  # what speed-ups are over, where nobody names another


class BaseError(ValueError):
    """A base that no row has; the message names those that there are."""


def base_of(rows: pd.DataFrame, name: str) -> str:
    """The base's key; raises BaseError where no row is of that contender and someone asked."""
    known = sorted(set(rows["contender"]))
    if name not in known:
        raise BaseError(
            f"--base={name}: no record of that contender (there are {', '.join(known)})"
        )
    return name


def doubts(ratio: Summary) -> list[str]:
    """Why its samples do not settle a measured ratio; empty where they do."""
    reasons = []
    if ratio.unstable:
        reasons.append(f"unstable: spread {ratio.spread:.0%}, n={ratio.count}")
    if ratio.low <= 1.0 <= ratio.high:
        reasons.append("interval includes 1: no difference shown")
    return reasons


def speedup_of(row: Mapping[Any, Any], base: Mapping[Any, Any]) -> dict[str, Any]:
    """``speedup`` of a row over its base with ``speedup_low`` and ``speedup_high`` where both were
    measured, ``unsure`` and the ``doubts`` as text; nothing is unsure of the base itself."""
    missing: dict[str, Any] = {"unsure": False, "doubts": ""}
    missing |= dict.fromkeys(("speedup", "speedup_low", "speedup_high"), math.nan)
    if not row["samples_step_s"] or not base["samples_step_s"]:
        return missing
    if row["record_id"] == base["record_id"]:
        return missing | {"speedup": 1.0}
    found = ratio_of_medians(base["samples_step_s"], row["samples_step_s"])
    if row["evidence"] != "measured":
        return missing | {"speedup": found.median}
    why = doubts(found)
    return {
        "speedup": found.median,
        "speedup_low": found.low,
        "speedup_high": found.high,
        "unsure": bool(why),
        "doubts": "; ".join(why),
    }


def paired_speedups(rows: pd.DataFrame, base: str = BASE) -> pd.DataFrame:
    """One row per cell and contender but the base, each in its fastest configuration:
    ``speedup_of``, ``memory_ratio`` (peaks of one kind alone), and ``records``, the base's last."""
    best = best_configuration(rows)
    bases = best[best["contender"] == base]
    others = best[best["contender"] != base]
    both = others.merge(bases, on=CELL, suffixes=("", "_base"))
    kept = [*CELL, "on_cpu", "contender", "default_degrees", "parameters"]
    lines = [{key: row[key] for key in kept} | _pair(row) for row in both.to_dict("records")]
    names = ["speedup", "speedup_low", "speedup_high", "unsure", "doubts", "memory_ratio"]
    return pd.DataFrame(lines, columns=[*kept, *names, "records"])


def _pair(row: dict[Any, Any]) -> dict[str, Any]:
    """One merged row, in which the base's columns end in ``_base``."""
    base: dict[Any, Any] = {key: row[f"{key}_base"] for key in ("samples_step_s", "record_id")}
    same_kind = row["memory_kind"] and row["memory_kind"] == row["memory_kind_base"]
    return {
        **speedup_of(row, base),
        "memory_ratio": row["peak_gib"] / row["peak_gib_base"] if same_kind else math.nan,
        "records": f"{row['record_id']} {row['record_id_base']}",
    }
