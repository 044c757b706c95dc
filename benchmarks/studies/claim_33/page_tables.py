"""Makes the tables of docs/verdict.md from the judged cells."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields

import pandas as pd

from benchmarks.report import words
from benchmarks.studies.claim_33.judge import (
    BASELINES,
    CELL,
    CLAIM,
    EQUAL,
    JUDGED,
    MODES,
    TIE,
    unfit,
)
from zeropp.sim.losses import Losses

_KINDS = [kind.name for kind in fields(Losses) if kind.name != "limit"]
_LABELS = {"zeropp": "ZeroPP", **BASELINES}

_REPRODUCED = [
    *("model", "cluster", "num_gpus", "global_batch"),
    *(f"speedup_over_{name}" for name in JUDGED),
    *("zeropp_peak_gib", "deepspeed_3d_peak_gib"),
]


def page_tables(verdicts: pd.DataFrame, plans: pd.DataFrame) -> dict[str, str]:
    """Markdown by name: ``answer`` (one sentence per baseline), and the tables ``cells``, ``best``,
    ``limit``, ``behind``, ``reproduced``, ``memory``, ``network``, ``equal``, ``paper``.
    ``verdicts`` are the judged cells, ``plans`` the rows that they were judged from."""
    own = verdicts[verdicts.bandwidth == 1.0]
    best, equal, paper = (own[own["mode"] == mode] for mode in MODES)
    return {
        "answer": _answer(best),
        "cells": _cells(best),
        "behind": _behind(best, plans),
        "best": _spread(best, list(BASELINES), "speedup_over_{}", "ZeroPP over"),
        "limit": _spread(best, ["zeropp", *BASELINES], "{}_share_of_limit", "contender"),
        "reproduced": _reproduced(best),
        "memory": _memory({"best plans": best, "equal degrees": equal, "paper's setting": paper}),
        "network": _network(verdicts[verdicts["mode"] == "best"]),
        "equal": _spread(equal, list(EQUAL), "speedup_over_{}", "ZeroPP over"),
        "paper": _spread(paper, list(EQUAL), "speedup_over_{}", "ZeroPP over"),
    }


def _answer(best: pd.DataFrame) -> str:
    """What the cells say of the claim, with one sentence per judged contender."""
    told = []
    for name in JUDGED:
        speedups = best[f"speedup_over_{name}"].dropna()
        reached = int((speedups >= CLAIM).sum())
        told.append(
            f"Over {BASELINES[name]}, ZeroPP at its best plan reaches {CLAIM} times the speed in "
            f"{reached} of {len(speedups)} cells (median {words.ratio(speedups.median())}, from "
            f"{words.ratio(speedups.min())} to {words.ratio(speedups.max())})." + unfit(best, name)
        )
    return " ".join(told)


def _cells(best: pd.DataFrame) -> str:
    """Which batches were compared, per model, cluster and number of GPUs."""
    rows = []
    for (model, cluster, gpus), group in best.groupby(["model", "cluster", "num_gpus"]):
        batches = ", ".join(f"{batch:g}" for batch in sorted(group.sequences_per_gpu))
        names = [words.model_label(str(model)), words.cluster_label(str(cluster))]
        rows.append([*names, str(gpus), batches])
    return _markdown(["model", "cluster", "GPUs", "sequences per GPU and step"], rows)


def _behind(best: pd.DataFrame, plans: pd.DataFrame) -> str:
    """Cells in which ZeroPP is behind the bound by more than a tie, and which losses differ."""
    rows = []
    lost = plans[(plans["mode"] == "best") & plans.limit_s.notna()].set_index([*CELL, "contender"])
    slower = best[best.speedup_over_best_3d < 1 - TIE].sort_values("speedup_over_best_3d")
    for _, cell in slower.iterrows():
        key = tuple(cell[name] for name in CELL)
        ours, theirs = (lost.loc[(*key, name)] for name in ("zeropp", "best_3d"))
        more = {
            kind: 100 * float(ours[f"{kind}_s"] - theirs[f"{kind}_s"]) / float(ours["limit_s"])
            for kind in _KINDS
        }
        ranked = sorted(more, key=more.__getitem__, reverse=True)
        place = [words.model_label(key[0]), words.cluster_label(key[1]), str(key[2]), str(key[3])]
        ratio = words.ratio(cell["speedup_over_best_3d"])
        kinds = ([k for k in ranked[:3] if more[k] >= 0.5], [k for k in ranked[-2:] if more[k] < 0])
        rows.append([*place, ratio, *(_told(side, more) for side in kinds)])
    if not rows:
        return f"ZeroPP is behind the bound by more than {TIE:.0%} in no cell."
    heads = ["model", "cluster", "GPUs", "batch", "over the bound", "loses more to", "less to"]
    return _markdown(heads, rows)


def _told(kinds: Iterable[str], more: Mapping[str, float]) -> str:
    return ", ".join(f"{kind.replace('_', ' ')} {more[kind]:+.1f} %" for kind in kinds)


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
    return _markdown([head, *(f"{float(str(batch)):g} per GPU" for batch in batches)], rows)


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
    return _markdown([*heads, "ZeroPP GiB", "DeepSpeed GiB"], rows)


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
    return _markdown(["plans", "peak over that of", "lowest", "median", "highest"], rows)


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
    return _markdown(["over", "sequences per GPU", *(f"{factor:g}×" for factor in factors)], rows)


def _by_factor(group: pd.DataFrame, name: str, factors: list[float]) -> Iterator[str]:
    speedups = group.set_index("bandwidth")[f"speedup_over_{name}"]
    return (f"{speedups[factor]:.2f}" for factor in factors)


def _markdown(heads: list[str], rows: list[list[str]]) -> str:
    """A Markdown table in which columns of numbers are aligned to the right."""
    rules = ["---:" if _is_numeric([row[i] for row in rows]) else "---" for i in range(len(heads))]
    lines = ["| " + " | ".join(heads) + " |", "|" + "|".join(rules) + "|"]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def _is_numeric(texts: list[str]) -> bool:
    return bool(texts) and all(text.replace(".", "", 1).isdigit() for text in texts)
