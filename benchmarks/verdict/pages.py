"""The tables and numbers of README and docs/verdict.md, from the judged cells."""

from __future__ import annotations

import json
from collections.abc import Mapping

import numpy as np
import pandas as pd

from benchmarks.report import display
from benchmarks.report.evidence import published_errors
from benchmarks.report.table import markdown_table
from benchmarks.specification.contenders import COMPARED
from benchmarks.verdict.assumptions import ASSUMPTIONS
from benchmarks.verdict.judge import (
    BASELINES,
    BOUND,
    CLAIM,
    COMPARABLE,
    EQUAL,
    JUDGED,
    LABELS,
    MODES,
    OPPONENTS,
    OWN,
    behind,
    by_batch,
    reached,
    with_shared_plans,
)
from benchmarks.verdict.uncertainty import (
    SEED,
    Interval,
    Uncertainty,
    blind_errors,
    judged,
    kempnerforge_replays,
    program_errors,
)

# The rows of the headline: the claim's opponent and the same program as it runs fastest, and those
# with which a reader would compare.
_HEADLINE = (
    *("deepspeed_3d", "deepspeed_best"),
    *("megatron_core", "torchtitan", "fsdp", "megatron_fsdp", BOUND),
)
NOTHING = "No case has been simulated in this setting."


def page_tables(plans: pd.DataFrame, repriced: pd.DataFrame) -> dict[str, str]:
    """By name, the tables of the pages in Markdown, and the numbers of their sentences. ``plans``
    are the rows, and ``repriced`` those of ``assumptions.csv``."""
    verdicts, uncertainty = judged(plans, repriced)
    own = verdicts[verdicts.bandwidth == 1.0]
    best, equal, paper = (own[own["mode"] == mode] for mode in MODES)
    of_own = own[own["mode"] == OWN]
    return _numbers(best, plans, uncertainty) | {
        "rows": rows_table(best, uncertainty),
        "headline": _headline(best, uncertainty),
        "headline_own": _headline(of_own, Uncertainty(of_own, repriced, program_errors())),
        "answer": _answer(best, uncertainty),
        "assumptions": _assumptions(uncertainty),
        "cells": _cells(best),
        "behind": behind(best, plans),
        "best": _spread(best, list(BASELINES), "speedup_over_{}", "ZeroPP over"),
        "limit": _spread(best, ["zeropp", *BASELINES], "{}_share_of_limit", "program"),
        "memory": _memory({"best plans": best, "equal degrees": equal, "paper's setting": paper}),
        "network": _network(verdicts[verdicts["mode"] == "best"]),
        "equal": _given(equal),
        "paper": _given(paper),
    }


def _numbers(best: pd.DataFrame, plans: pd.DataFrame, uncertainty: Uncertainty) -> dict[str, str]:
    """The numbers of the pages' sentences: of cells and plans, of what is published near to
    ZeroPP's layout, and of the errors that are drawn."""
    core_1, core_4 = map(_median, uncertainty.medians["megatron_core"].values())
    ours = plans[(plans["contender"] == "zeropp") & (plans["mode"] == "best")]
    ours = ours[(ours["bandwidth"] == 1.0) & ours["step_s"].notna()]
    shared = with_shared_plans(plans[plans["mode"] == "best"])
    bounds = shared[(shared["contender"] == BOUND) & shared["setting"].notna()]["setting"]
    others = [json.loads(s)["knobs"]["name"] != COMPARED[BOUND].contender.name for s in bounds]
    nearest = published_errors()
    nearest = nearest[(nearest["program"] == "kempnerforge") & (nearest["quantity"] == "speed")]
    replayed, blind = kempnerforge_replays(), np.abs(np.expm1(blind_errors()))
    errors, rng = program_errors(), np.random.default_rng(SEED)
    drawn = np.abs(np.expm1(errors.draw(rng, 1) - errors.draw(rng, 1)))
    return {
        "cells_own": str(len(best)),
        "core_1": core_1,
        "core_4": core_4,
        "without_pipeline": str(int((~ours["plan"].str.contains(r"(?<!\S)pp=")).sum())),
        "bound_taken": str(sum(others)),
        "bounds": str(len(others)),
        "nearest_runs": str(len(nearest)),
        "nearest_described": f"{nearest['error'].min():.0%} to {nearest['error'].max():.0%}",
        "nearest_replayed": f"{replayed.min():.0%} to {replayed.max():.0%}",
        "blind_runs": str(len(blind)),
        "blind_median": f"{np.median(blind):.0%}",
        "blind_p90": f"{np.quantile(blind, 0.9):.0%}",
        "error_runs": f"{sum(map(len, errors.rest)):,}",
        "error_programs": str(len(errors.rest)),
        "drawn_median": f"{np.median(drawn):.1%}",
        "drawn_p90": f"{np.quantile(drawn, 0.9):.1%}",
    }


def rows_table(best: pd.DataFrame, uncertainty: Uncertainty) -> str:
    """ZeroPP's speed over that of whom people ask for first."""
    lines = [
        [
            BASELINES[name],
            *map(_median, uncertainty.medians[name].values()),
            "{} ({})".format(*reached(best, name)),
        ]
        for name in ("megatron_core", "fsdp", "deepspeed_best", "deepspeed_3d")
    ]
    heads = ["ZeroPP's speed over", "1 sequence per GPU and step", "4 or more"]
    heads += [f"cases at {CLAIM} or above, of {len(best)} (at most {COMPARABLE} times the memory)"]
    return markdown_table(heads, lines)


def _median(interval: Interval) -> str:
    return f"**{interval.value:.2f}** ({interval.low:.2f} to {interval.high:.2f})"


def _headline(best: pd.DataFrame, uncertainty: Uncertainty) -> str:
    """Per row the median by sequences per GPU, with its error and the range over cells, and how
    many cells reach the claim."""
    if best.empty:
        return NOTHING
    groups = by_batch(best)
    rows = []
    for name in _HEADLINE:
        if best[f"speedup_over_{name}"].isna().all():
            continue  # no plan of it fits, or none has been searched
        line = [LABELS[name]]
        for words, cells in groups.items():
            median, ratios = uncertainty.medians[name][words], best[f"speedup_over_{name}"][cells]
            spread = f"{ratios.min():.2f} to {ratios.max():.2f}"
            line += [f"**{median.value:.2f}**", f"{median.low:.2f} to {median.high:.2f}", spread]
        count = uncertainty.reached(name)
        line.append(f"{count.value:.0f} ({count.low:.0f} to {count.high:.0f})")
        line.append(str(uncertainty.surely_reached(name)))
        rows.append(line)
    heads = [
        head
        for words in groups
        for head in (f"{words}: median", "its error (90 %)", "single cases")
    ]
    heads += [f"cases at {CLAIM} or more (90 %)", f"cases whose low end is {CLAIM} or more"]
    return markdown_table(["ZeroPP over", *heads], rows)


def _assumptions(uncertainty: Uncertainty) -> str:
    """The median over three rows at both ends of the range of every assumption."""
    moved = {name: uncertainty.moved_medians(name) for name in OPPONENTS}
    groups = list(moved[OPPONENTS[0]])
    rows = []
    for number, assumption in enumerate(ASSUMPTIONS):
        ends = [moved[name][group][number] for name in OPPONENTS for group in groups]
        moves = f"× {assumption.low:g} to {assumption.high:g}"
        words = [assumption.label, assumption.source, moves]
        rows.append([*words, *(f"{low:.2f} to {high:.2f}" for low, high in ends)])
    heads = [f"{BASELINES[name]}, {group}" for name in OPPONENTS for group in groups]
    return markdown_table(["constant", "from", "range", *heads], rows)


def _answer(best: pd.DataFrame, uncertainty: Uncertainty) -> str:
    """In how many cells ZeroPP reaches the claim over each judged row, and with which memory."""
    lines = []
    for name in JUDGED:
        fast, comparable = reached(best, name)
        count = uncertainty.reached(name)
        interval = f"{count.low:.0f} to {count.high:.0f}"
        cells = len(best[f"speedup_over_{name}"].dropna())
        lines.append([BASELINES[name], f"{fast} of {cells}", interval, str(comparable)])
    heads = ["ZeroPP over", f"cases at {CLAIM} or more", "90 %"]
    return markdown_table([*heads, f"of these with at most {COMPARABLE} times the memory"], lines)


def _given(cells: pd.DataFrame) -> str:
    """Speed-ups in a given setting, and how often they come at comparable memory."""
    spread = _spread(cells, list(EQUAL), "speedup_over_{}", "ZeroPP over")
    if cells.empty:
        return spread
    lines = []
    for name in EQUAL:
        fast, comparable = reached(cells, name)
        fits = int((cells.zeropp_peak_gib <= COMPARABLE * cells[f"{name}_peak_gib"]).sum())
        compared = len(cells[f"speedup_over_{name}"].dropna())
        lines.append([BASELINES[name], f"{fast} of {compared}", str(comparable), str(fits)])
    heads = ["ZeroPP over", f"cases at {CLAIM} or more"]
    heads += [f"of these with at most {COMPARABLE} times the memory", "of all cases with that"]
    return f"{spread}\n\n{markdown_table(heads, lines)}"


def _cells(best: pd.DataFrame) -> str:
    """Which batches were compared, per model, cluster and number of GPUs."""
    rows = []
    for (model, cluster, gpus), group in best.groupby(["model", "cluster", "num_gpus"]):
        batches = ", ".join(f"{batch:g}" for batch in sorted(group.sequences_per_gpu))
        names = [display.model_label(str(model)), display.cluster_label(str(cluster))]
        rows.append([*names, str(gpus), batches])
    return markdown_table(["model", "cluster", "GPUs", "sequences per GPU and step"], rows)


def _spread(cells: pd.DataFrame, names: list[str], column: str, head: str) -> str:
    """The median, lowest and highest value of a column per contender and sequences per GPU."""
    if cells.empty:
        return NOTHING
    batches = dict(list(cells.groupby("sequences_per_gpu")))
    rows = []
    for name in names:
        row = [LABELS[name]]
        for group in batches.values():
            values = group[column.format(name)].dropna()
            spread = f"{values.median():.2f} ({values.min():.2f} to {values.max():.2f})"
            row.append(spread if len(values) else "nothing fits")
        rows.append(row)
    return markdown_table([head, *(f"{float(str(batch)):g} per GPU" for batch in batches)], rows)


def _memory(bases: Mapping[str, pd.DataFrame]) -> str:
    """ZeroPP's peak memory divided by that of each judged contender, per basis of comparison."""
    rows = []
    for label, cells in bases.items():
        for name in JUDGED:
            ratios = (cells["zeropp_peak_gib"] / cells[f"{name}_peak_gib"]).dropna()
            if ratios.empty:  # not compared on this basis
                continue
            values = (ratios.min(), ratios.median(), ratios.max())
            rows.append([label, BASELINES[name], *(f"{value:.2f}" for value in values)])
    return markdown_table(["plans", "peak over that of", "lowest", "median", "highest"], rows)


def _network(best: pd.DataFrame) -> str:
    """The speed-up per inter-node bandwidth, for the cells in which that was varied."""
    keys = ["model", "cluster", "num_gpus"]
    varied = best[best.groupby([*keys, "global_batch"])["bandwidth"].transform("nunique") > 1]
    factors = sorted(varied.bandwidth.unique())
    rows = [
        [BASELINES[name], f"{sequences:g}", *(f"{speedups[factor]:.2f}" for factor in factors)]
        for name in JUDGED
        for sequences, group in varied.groupby("sequences_per_gpu")
        for speedups in [group.set_index("bandwidth")[f"speedup_over_{name}"]]
    ]
    return markdown_table(
        ["over", "sequences per GPU", *(f"{factor:g}×" for factor in factors)], rows
    )
