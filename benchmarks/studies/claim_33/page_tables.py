"""Makes the tables of docs/verdict.md from the judged cells."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import pandas as pd

from benchmarks.report import words
from benchmarks.studies.claim_33.behind import behind, bound_note
from benchmarks.studies.claim_33.judge import (
    BASELINES,
    CELL,
    CLAIM,
    COMPARABLE,
    EQUAL,
    JUDGED,
    MODES,
    TIE,
    at_edge,
    judge,
    reached,
    unfit,
)
from benchmarks.studies.claim_33.markdown import table

Key = tuple[str, str, int, int, float]  # model, cluster, GPUs, global batch, bandwidth

_LABELS = {"zeropp": "ZeroPP", **BASELINES}

_REPRODUCED = [
    *("model", "cluster", "num_gpus", "global_batch"),
    *(f"speedup_over_{name}" for name in JUDGED),
    *("zeropp_peak_gib", "deepspeed_3d_peak_gib"),
]


def page_tables(plans: pd.DataFrame, configured: Collection[Key]) -> dict[str, str]:
    """Markdown by name: ``answer`` (one sentence per baseline), ``bound`` (whose plans it takes),
    ``missing`` (cells without rows), and the tables ``cells``, ``best``, ``limit``, ``behind``,
    ``reproduced``, ``memory``, ``network``, ``equal``, ``paper``. ``plans`` are the rows, and
    ``configured`` the keys of all cells that the study's configuration asks for."""
    verdicts = judge(plans)
    own = verdicts[verdicts.bandwidth == 1.0]
    best, equal, paper = (own[own["mode"] == mode] for mode in MODES)
    return {
        "answer": _answer(best),
        "bound": bound_note(plans),
        "missing": _missing(plans, configured),
        "cells": _cells(best),
        "behind": behind(best, plans),
        "best": _spread(best, list(BASELINES), "speedup_over_{}", "ZeroPP over"),
        "limit": _spread(best, ["zeropp", *BASELINES], "{}_share_of_limit", "contender"),
        "reproduced": _reproduced(best),
        "memory": _memory({"best plans": best, "equal degrees": equal, "paper's setting": paper}),
        "network": _network(verdicts[verdicts["mode"] == "best"]),
        "equal": _given(equal),
        "paper": _given(paper),
    }


def _answer(best: pd.DataFrame) -> str:
    """What the cells say of the claim, with a few sentences per judged contender."""
    told = (f"Over {BASELINES[n]}, ZeroPP at its best plan {_reached(best, n)}" for n in JUDGED)
    return " ".join(told)


def _reached(cells: pd.DataFrame, name: str) -> str:
    """The rest of a sentence on how often ZeroPP reaches the claim over a contender, and with how
    much memory."""
    speedups = cells[f"speedup_over_{name}"].dropna()
    fast, comparable = reached(cells, name)
    memory = f", in {comparable} of them with at most {COMPARABLE} times the memory" if fast else ""
    edge = at_edge(cells, name)
    are = "1 cell is" if edge == 1 else f"{edge} cells are"
    return (
        f"reaches {CLAIM} times the speed in {fast} of {len(speedups)} cells{memory} (median "
        f"{words.ratio(speedups.median())}, from {words.ratio(speedups.min())} to "
        f"{words.ratio(speedups.max())})."
        + (f" {are} at the claim's edge, within {TIE:.0%} of {CLAIM}." if edge else "")
        + unfit(cells, name)
    )


def _given(cells: pd.DataFrame) -> str:
    """Speed-ups in a given setting, and how often they come at comparable memory."""
    spread = _spread(cells, list(EQUAL), "speedup_over_{}", "ZeroPP over")
    if cells.empty:
        return spread
    told = (f"Over {BASELINES[name]}, ZeroPP {_reached(cells, name)}" for name in EQUAL)
    held = (
        f"Its peak is at most {COMPARABLE} times that of {BASELINES[name]} in "
        f"{int((cells.zeropp_peak_gib <= COMPARABLE * cells[f'{name}_peak_gib']).sum())} of "
        f"{len(cells)} cells."
        for name in EQUAL
    )
    return "\n\n".join([spread, " ".join([*told, *held])])


def _missing(plans: pd.DataFrame, configured: Collection[Key]) -> str:
    """Which configured cells have no rows."""
    missing = sorted(set(configured) - set(plans[CELL].itertuples(index=False, name=None)))
    if not missing:
        return "Every cell that the study's configuration asks for is among the rows."
    told = [
        f"{words.model_label(model)} on {gpus} {words.cluster_label(cluster)}, "
        f"{batch / gpus:g} per GPU" + ("" if factor == 1.0 else f", {factor:g}× the bandwidth")
        for model, cluster, gpus, batch, factor in missing
    ]
    return "Configured, but not among the rows: " + "; ".join(told) + "."


def _cells(best: pd.DataFrame) -> str:
    """Which batches were compared, per model, cluster and number of GPUs."""
    rows = []
    for (model, cluster, gpus), group in best.groupby(["model", "cluster", "num_gpus"]):
        batches = ", ".join(f"{batch:g}" for batch in sorted(group.sequences_per_gpu))
        names = [words.model_label(str(model)), words.cluster_label(str(cluster))]
        rows.append([*names, str(gpus), batches])
    return table(["model", "cluster", "GPUs", "sequences per GPU and step"], rows)


def _spread(cells: pd.DataFrame, names: list[str], column: str, head: str) -> str:
    """The median, lowest and highest value of a column per contender and sequences per GPU."""
    if cells.empty:
        return "No cell has been priced in this setting."
    batches = dict(list(cells.groupby("sequences_per_gpu")))
    rows = []
    for name in names:
        row = [_LABELS[name]]
        for group in batches.values():
            values = group[column.format(name)].dropna()
            spread = f"{values.median():.2f} ({values.min():.2f} to {values.max():.2f})"
            row.append(spread if len(values) else "nothing fits")
        rows.append(row)
    return table([head, *(f"{float(str(batch)):g} per GPU" for batch in batches)], rows)


def _reproduced(cells: pd.DataFrame) -> str:
    found = cells[cells.speedup_over_deepspeed_3d >= CLAIM].sort_values(_REPRODUCED[:4])
    rows = [
        [
            *(words.model_label(row[0]), words.cluster_label(row[1]), *map(str, row[2:4])),
            *(words.ratio(value) for value in row[4:7]),
            *(f"{value:.0f}" for value in row[7:]),
        ]
        for row in found[_REPRODUCED].itertuples(index=False, name=None)
    ]
    heads = ["model", "cluster", "GPUs", "batch", *(f"over {_LABELS[name]}" for name in JUDGED)]
    return table([*heads, "ZeroPP GiB", "DeepSpeed GiB"], rows)


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
    return table(["plans", "peak over that of", "lowest", "median", "highest"], rows)


def _network(best: pd.DataFrame) -> str:
    """The speed-up per inter-node bandwidth, for the cells in which that was varied."""
    keys = ["model", "cluster", "num_gpus"]
    varied = best[best.groupby([*keys, "global_batch"])["bandwidth"].transform("nunique") > 1]
    factors = sorted(varied.bandwidth.unique())
    rows = [
        [BASELINES[name], f"{sequences:g}", *_by_factor(group, name, factors)]
        for name in JUDGED
        for sequences, group in varied.groupby("sequences_per_gpu")
    ]
    return table(["over", "sequences per GPU", *(f"{factor:g}×" for factor in factors)], rows)


def _by_factor(group: pd.DataFrame, name: str, factors: list[float]) -> Iterator[str]:
    speedups = group.set_index("bandwidth")[f"speedup_over_{name}"]
    return (f"{speedups[factor]:.2f}" for factor in factors)
