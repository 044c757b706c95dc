"""The speed-up between two contenders in the same cell, and whether the samples settle it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pandas as pd

from benchmarks.records.stats import Summary, ratio_of_medians
from benchmarks.report.frame import CELL, best_configuration

SUBJECT = "zeropp"  # the contender that the suite is about: its columns come first
BASE = "deepspeed_3d"  # speed-ups are over this contender unless another one is named


class BaseError(ValueError):
    """No row is of the contender that was named as the base; the message names the contenders that
    rows are of."""


def base_of(rows: pd.DataFrame, name: str) -> str:
    """``name``, the key of the contender over which speed-ups are given. Raises BaseError if no row
    is of that contender."""
    known = sorted(set(rows["contender"]))
    if name not in known:
        raise BaseError(
            f"--base={name}: no record of that contender (there are {', '.join(known)})"
        )
    return name


def doubts(ratio: Summary) -> list[str]:
    """The reasons why samples do not settle a measured ratio; empty if they do."""
    reasons = []
    if ratio.unstable:
        reasons.append(f"unstable: spread {ratio.spread:.0%}, n={ratio.count}")
    if ratio.low <= 1.0 <= ratio.high:
        reasons.append("interval includes 1: no difference shown")
    return reasons


def speedup_of(row: Mapping[Any, Any], base: Mapping[Any, Any]) -> dict[str, Any]:
    """The ``speedup`` of a row over its base, with ``speedup_low`` and ``speedup_high`` if both
    were measured; ``unsure`` says whether there are doubts, which ``doubts`` has as text. The base
    itself has none."""
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
    """One row per cell and contender except for the base, each in its fastest configuration.

    A row has the fields of ``speedup_of``, ``memory_ratio`` (only where both peaks are of the same
    kind), and ``records``, of which the base's is the last.
    """
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
