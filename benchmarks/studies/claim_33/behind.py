"""Tells where ZeroPP is behind the bound of all public 3D parts, and by which losses."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields

import pandas as pd

from benchmarks.report import words
from benchmarks.studies.claim_33.judge import BASELINES, BOUND, CELL, KEYS, TIE, with_bound
from benchmarks.studies.claim_33.markdown import table
from zeropp.sim.lost_time import Losses

_KINDS = [kind.name for kind in fields(Losses) if kind.name != "limit"]
_HEADS = ["model", "cluster", "GPUs", "batch", "over the bound", "loses more to", "less to"]


@dataclass(frozen=True)
class _Slower:
    """A cell in which ZeroPP is behind the bound, with the rows of both. ``more`` is what ZeroPP
    loses beyond the bound by cause, in per cent of the step at the compute limit."""

    ours: pd.Series
    theirs: pd.Series
    speedup: float

    @property
    def more(self) -> dict[str, float]:
        ours, theirs = self.ours, self.theirs
        limit = float(ours["limit_s"])
        return {k: 100 * float(ours[f"{k}_s"] - theirs[f"{k}_s"]) / limit for k in _KINDS}

    @property
    def ranked(self) -> list[str]:
        """The causes, the one to which ZeroPP loses most beyond the bound first."""
        more = self.more
        return sorted(more, key=more.__getitem__, reverse=True)

    def cells(self) -> list[str]:
        """The cells of this row of the table."""
        row, more, ranked = self.ours, self.more, self.ranked
        place = [words.model_label(row["model"]), words.cluster_label(row["cluster"])]
        place += [str(row["num_gpus"]), str(row["global_batch"]), words.ratio(self.speedup)]
        sides = ([k for k in ranked[:3] if more[k] >= 0.5], [k for k in ranked[-2:] if more[k] < 0])
        return [*place, *(_told(side, more) for side in sides), _plan(row), _plan(self.theirs)]


def behind(best: pd.DataFrame, plans: pd.DataFrame) -> str:
    """The cells in which ZeroPP is behind the bound by more than a tie: which losses differ, with
    which plans, and what most of them have in common."""
    rows = with_bound(plans[(plans["mode"] == "best") & plans.limit_s.notna()])
    rows = rows.set_index([*CELL, "contender"], drop=False)
    slower = best[best.speedup_over_best_3d < 1 - TIE].sort_values("speedup_over_best_3d")
    keys = slower[CELL].itertuples(index=False, name=None)
    found = [
        _Slower(rows.loc[(*key, "zeropp")], rows.loc[(*key, BOUND)], speedup)
        for key, speedup in zip(keys, slower["speedup_over_best_3d"], strict=True)
    ]
    if not found:
        return f"ZeroPP is behind the bound by more than {TIE:.0%} in no cell."
    heads = [*_HEADS, "ZeroPP's plan", "the bound's plan"]
    return table(heads, [cell.cells() for cell in found]) + "\n\n" + _in_common(found)


def bound_note(plans: pd.DataFrame) -> str:
    """In how many cells the bound is another program's plan."""
    best = plans[plans["mode"] == "best"].set_index([*KEYS, "contender"])
    speeds = best.tokens_per_s_per_gpu.unstack()
    raised = with_bound(plans).set_index([*KEYS, "contender"]).tokens_per_s_per_gpu.unstack()
    count = int((raised[BOUND].reindex(speeds.index) > speeds[BOUND]).sum())
    return (
        f"In {count} of {len(speeds)} cells the search for {BASELINES[BOUND]} ended, within its "
        "tolerance, with a plan slower than that of another 3D program; there the bound is that "
        "program's plan."
    )


def _in_common(found: list[_Slower]) -> str:
    """Which loss is the largest in how many cells, and who has the smaller microbatch."""
    first = Counter(cell.ranked[0] for cell in found)
    told = ", ".join(f"{kind.replace('_', ' ')} in {n}" for kind, n in first.most_common())
    smaller = sum(_number(c.ours, "b") < _number(c.theirs, "b") for c in found)
    longer = sum(_number(c.ours, "pp") > _number(c.theirs, "pp") for c in found)
    return (
        f"Of these {len(found)} cells, ZeroPP's largest loss beyond the bound's is {told}. Its "
        f"microbatch is smaller than the bound's in {smaller}, and its pipeline is longer in "
        f"{longer}."
    )


def _plan(row: pd.Series) -> str:
    """A plan's degrees and microbatches, without its schedule's details, and its peak."""
    degrees = re.split(r"(?<= m=)(\d+)", str(row["plan"]), maxsplit=1)
    return "".join(degrees[:2]) + f", {row['peak_gib']:.0f} GiB"


def _number(row: pd.Series, name: str) -> int:
    """The number after ``name=`` in a plan; degrees of 1 are not written."""
    found = re.search(rf"(?<!\S){name}=(\d+)", str(row["plan"]))
    return int(found[1]) if found else 1


def _told(kinds: Iterable[str], more: Mapping[str, float]) -> str:
    return ", ".join(f"{kind.replace('_', ' ')} {more[kind]:+.1f} %" for kind in kinds)
