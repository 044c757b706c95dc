"""From simulated rows to one verdict per cell, in numbers and in a word.

The claim (arXiv 2402.03791, version 2) is up to 33 % more speed than 3D parallelism at comparable
memory. A cell reproduces it if ZeroPP is at least 1.33 times as fast as the baseline, and its peak
is at most 1.1 times the baseline's. If ZeroPP is faster by more than 6 %, the direction of the
claim holds, but not its size; within 6 % it is a tie.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import pandas as pd

from benchmarks.report import display
from benchmarks.report.table import markdown_table
from benchmarks.specification.contenders import COMPARED
from benchmarks.verdict.cells import CELL
from zeropp.price.lost_time import TimeBreakdown

CLAIM = 1.33
TIE = 0.06  # about the simulator's median error of a ratio of two programs
COMPARABLE = 1.1  # the largest ratio of peaks that counts as comparable memory
# All rows with which ZeroPP is compared, and those for which every cell gets a verdict: the claim's
# own opponent, the same program as it runs fastest, what most people would use, and the bound.
BASELINES = {row.name: row.label for row in COMPARED.values() if row.name != "zeropp"}
LABELS = {"zeropp": "ZeroPP", **BASELINES}
JUDGED = ("deepspeed_3d", "deepspeed_best", "megatron_core", "best_3d")
OPPONENTS = JUDGED[:3]  # programs that somebody trains with: all but the bound
EQUAL = ("deepspeed_3d", "megatron_core")  # also compared with equal degrees
BOUND = "best_3d"
# A search ends within its tolerance of the best plan, so one row may end with a plan slower than
# that of another row whose plans are among its own; then it takes that plan. The bound takes those
# of all programs of TP x PP x DP.
PUBLIC_3D = ("deepspeed_best", "megatron_core")
_TAKES = {
    "deepspeed_best": ("deepspeed_3d", "deepspeed_zero3"),
    BOUND: ("deepspeed_3d", *PUBLIC_3D),
}
MODES = ("best", "equal", "paper")  # plans, equal degrees, the paper's own setting
# Best plans of programs that add and send gradients in the type that is fastest of those that their
# own configuration has. In mode "best" everybody does so in fp32.
OWN = "own"
KEYS = [*CELL, "mode"]


def judge(plans: pd.DataFrame) -> pd.DataFrame:
    """One row per cell and mode: speed, memory, speed-ups over each baseline, and the verdict. The
    bound is the fastest public 3D plan (``with_shared_plans``)."""
    plans = with_own(plans)
    wide = with_shared_plans(plans).pivot(index=KEYS, columns="contender")
    priced = set(plans[[*KEYS, "contender"]].itertuples(index=False, name=None))
    rows = []
    for key, row in wide.iterrows():
        speed, memory = row["tokens_per_s_per_gpu"], row["peak_gib"]
        assert isinstance(key, tuple)
        out: dict[str, Any] = dict(zip(KEYS, key, strict=True))
        out["sequences_per_gpu"] = out["global_batch"] / out["num_gpus"]
        for name in ("zeropp", *BASELINES):
            out[f"{name}_tokens_per_s_per_gpu"] = speed.get(name)
            out[f"{name}_peak_gib"] = memory.get(name)
            out[f"{name}_share_of_limit"] = row["share_of_limit"].get(name)
        for name in BASELINES:
            out[f"speedup_over_{name}"] = speed["zeropp"] / speed.get(name, float("nan"))
        for name in JUDGED:
            is_compared = {(*key, name), (*key, "zeropp")} <= priced
            out[f"verdict_over_{name}"] = _word(out, name) if is_compared else "not compared"
        out["regime"] = _regime(row)
        rows.append(out)
    return pd.DataFrame(rows)


def plans_of(name: str) -> tuple[str, ...]:
    """The rows whose plans are among those of a row, itself first."""
    return (name, *_TAKES.get(name, ()))


def with_own(plans: pd.DataFrame) -> pd.DataFrame:
    """The plans, in which every row of mode "best" has one of mode "own": itself, if the program
    has no other types of gradients or is no faster with them."""
    best = plans[plans["mode"] == "best"]
    own = plans[plans["mode"] == OWN]
    wanted = best.set_index(CELL).index.isin(own.set_index(CELL).index)
    both = pd.concat([own, best[wanted].assign(mode=OWN)])
    both = both.sort_values("tokens_per_s_per_gpu", ascending=False, kind="stable")
    others = plans[plans["mode"] != OWN]
    return pd.concat([others, both.drop_duplicates([*KEYS, "contender"])], ignore_index=True)


def with_shared_plans(plans: pd.DataFrame) -> pd.DataFrame:
    """The plans, with those of rows that may take another row's replaced by the fastest of all that
    they may take: the bound's by that of all public 3D programs."""
    taken = plans
    for name in _TAKES:
        own = plans[plans.contender.isin(plans_of(name))]
        own = own.sort_values("contender", key=lambda names: names != name, kind="stable")
        own = own.sort_values("tokens_per_s_per_gpu", ascending=False, kind="stable")
        place = plans[plans.contender == name].reset_index()[["index", *KEYS]]
        fastest = place.merge(own.drop_duplicates(KEYS), on=KEYS).set_index("index")
        others = taken[taken.contender != name]
        taken = pd.concat([others, fastest.assign(contender=name)])[plans.columns].sort_index()
    return taken


def reached(cells: pd.DataFrame, name: str) -> tuple[int, int]:
    """In how many cells ZeroPP is at least 1.33 times as fast as a contender, and in how many of
    those its peak is at most 1.1 times the contender's."""
    fast = cells[cells[f"speedup_over_{name}"] >= CLAIM]
    comparable = fast["zeropp_peak_gib"] <= COMPARABLE * fast[f"{name}_peak_gib"]
    return len(fast), int(comparable.sum())


def by_batch(cells: pd.DataFrame) -> dict[str, pd.Series]:
    """Which cells have one sequence per GPU and step, and which have more, by the words for it."""
    return {
        "1 sequence per GPU": cells["sequences_per_gpu"] <= 1,
        "4 or more": cells["sequences_per_gpu"] >= 4,
    }


def _word(row: Mapping[str, Any], name: str) -> str:
    speedup = row[f"speedup_over_{name}"]
    if math.isnan(speedup):
        fits = pd.notna(row["zeropp_tokens_per_s_per_gpu"])
        return "baseline does not fit" if fits else "ZeroPP does not fit"
    if speedup >= CLAIM:
        memory = row["zeropp_peak_gib"] / row[f"{name}_peak_gib"]
        if memory <= COMPARABLE:
            return "reproduced"
        return f"faster, with {memory:.2f} times the memory"
    if speedup > 1 + TIE:
        return "faster, not reproduced"
    return "tie" if speedup >= 1 - TIE else "slower, not reproduced"


def _regime(row: pd.Series) -> str:
    """What the cell is like: the batch per GPU, and the bubble's share of DeepSpeed's step."""
    sequences = row.name[3] / row.name[2]  # type: ignore[index]
    batch = (
        "small batch" if sequences <= 1 else "large batch" if sequences >= 16 else "medium batch"
    )
    bubble = row["bubble"].get("deepspeed_3d")
    if pd.isna(bubble):
        return batch
    return f"{batch}, idle {100 * bubble:.0f} % in 3D"


_KINDS = [kind.name for kind in fields(TimeBreakdown) if kind.name != "limit"]
_HEADS = ["model", "cluster", "GPUs", "batch", "over the bound", "loses more to", "less to"]


def behind(best: pd.DataFrame, plans: pd.DataFrame) -> str:
    """The cells in which ZeroPP is behind the bound by more than a tie: which losses differ, in per
    cent of the step at the compute limit, and with which plans."""
    rows = with_shared_plans(plans[(plans["mode"] == "best") & plans.limit_s.notna()])
    rows = rows.set_index([*CELL, "contender"])
    slower = best[best.speedup_over_best_3d < 1 - TIE].sort_values("speedup_over_best_3d")
    lines = []
    for model, cluster, *numbers, ratio in slower[[*CELL, "speedup_over_best_3d"]].values.tolist():
        zeropp, bound = (rows.loc[(model, cluster, *numbers, name)] for name in ("zeropp", BOUND))
        limit = float(zeropp["limit_s"])
        more = {k: 100 * float(zeropp[f"{k}_s"] - bound[f"{k}_s"]) / limit for k in _KINDS}
        ranked = sorted(more, key=more.__getitem__, reverse=True)
        sides = ([k for k in ranked[:3] if more[k] >= 0.5], [k for k in ranked[-2:] if more[k] < 0])
        losses = [
            ", ".join(f"{kind.replace('_', ' ')} {more[kind]:+.1f} %" for kind in side)
            for side in sides
        ]
        place = [display.model_label(model), display.cluster_label(cluster)]
        place += [*map(str, numbers[:2]), display.ratio(ratio)]
        lines.append([*place, *losses, _plan(zeropp), _plan(bound)])
    heads = [*_HEADS, "ZeroPP's plan", "the bound's plan"]
    return markdown_table(heads, lines)


def _plan(row: pd.Series) -> str:
    """A plan's degrees and microbatches, without its schedule's details, and its peak."""
    degrees = re.split(r"(?<= m=)(\d+)", str(row["plan"]), maxsplit=1)
    return "".join(degrees[:2]) + f", {row['peak_gib']:.0f} GiB"
